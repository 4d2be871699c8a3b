"""LAMB on NVIDIA GPUs: in two passes where norms are added up over ranks between them, else in one kernel.

The one kernel, of two that there are, keeps on the chip what its first pass computed; csrc/cuda/lamb_stream.cu and
lamb_fused.cu say how. Sums are added up in one order, so results have the same bits each time on one kind of GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops import cuda_launch
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.cuda_launch import (
    BIAS_CORRECTION,
    EPS_INSIDE,
    Call,
    KernelMachine,
    Tuning,
    call_of,
    dtype_number,
    grid_of,
    macros_of,
    tables,
)

__all__ = ["lamb_", "lamb_apply_", "lamb_moments_"]

Rate = float | Tensor

AHEAD = 2  # tiles that a block begins of the next group before it waits for the rates of one
# Elements up to which lamb_stream.cu is the faster of the two: on an H100 it takes 0.62 of lamb_fused.cu's time at 1 M,
# 0.96 at 11 M, 1.03 at 500 M (benchmarks/cuda_tunings.py).
STREAMED_NUMEL = 16_000_000
_FIRST_PASS = ("lamb_moments", "lamb_norms")


def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
) -> Tensor:
    """``reference.lamb_moments_``; the same bits each time on one kind of GPU."""
    if not params:
        return torch.zeros(0, 2, dtype=torch.float32)
    flags = EPS_INSIDE * eps_inside_sqrt
    call = call_of(0.0, (beta1, beta2, eps, weight_decay), scale_and_skip, flags=flags)
    places = (params, grads, (), exp_avgs, exp_avg_sqs)
    machine = cuda_launch.machine_of(params[0])
    tuning = machine.tunings.lamb
    kernel, total = (machine.kernel("lamb.cu", name, _lamb_macros(tuning, places)) for name in _FIRST_PASS)
    launches = list(tables(call, places, tuning))
    device, complete = params[0].device, sum(table.entries for table in launches) == len(params)
    norms = (torch.empty if complete else torch.zeros)(len(params), 2, dtype=torch.float32, device=device)
    parts = torch.empty(2 * max((table.tiles for table in launches), default=0), dtype=torch.float64, device=device)
    for table in launches:
        grid = grid_of(machine, tuning, table.tiles)
        table.workspace = parts.data_ptr()
        machine.launch(kernel, grid, tuning.threads, [table])
        arguments = (table, ctypes.c_uint32(grid), ctypes.c_uint64(norms.data_ptr()))
        machine.launch(total, table.entries, tuning.threads, arguments)
    return norms


def lamb_apply_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    norms: Tensor,
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
) -> None:
    """``reference.lamb_apply_``; the last entries first, of which the L2 cache may still have some."""
    if not params:
        return
    flags = EPS_INSIDE * eps_inside_sqrt | BIAS_CORRECTION * bias_correction
    call = call_of(lr, (beta1, beta2, eps, weight_decay, min_coeff, max_coeff), scale_and_skip, steps, flags=flags)
    places = (params, (), outs, exp_avgs, exp_avg_sqs)
    machine = cuda_launch.machine_of(params[0])
    tuning = machine.tunings.lamb
    kernel = machine.kernel("lamb.cu", "lamb_apply", _lamb_macros(tuning, places))
    for table in reversed(list(tables(call, places, tuning))):
        arguments = (table, ctypes.c_uint64(norms.data_ptr()))
        machine.launch(kernel, grid_of(machine, tuning, table.tiles), tuning.threads, arguments)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
) -> None:
    """``reference.lamb_``, in one launch for each sixty entries."""
    if not params:
        return
    flags = EPS_INSIDE * eps_inside_sqrt | BIAS_CORRECTION * bias_correction
    call = call_of(lr, (beta1, beta2, eps, weight_decay, min_coeff, max_coeff), scale_and_skip, steps, flags=flags)
    places = (params, grads, outs, exp_avgs, exp_avg_sqs)
    small = sum(param.numel() for param in params) <= STREAMED_NUMEL
    if not ((small and _streamed(call, places)) or _fused(call, places)):
        numbers: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        numbers["eps_inside_sqrt"] = eps_inside_sqrt
        trust: dict[str, Any] = {"lr": lr, "bias_correction": bias_correction}
        trust |= {"min_coeff": min_coeff, "max_coeff": max_coeff}
        norms = lamb_moments_(params, grads, exp_avgs, exp_avg_sqs, scale_and_skip, **numbers)
        lamb_apply_(params, exp_avgs, exp_avg_sqs, outs, steps, norms, scale_and_skip, **numbers, **trust)


def _streamed(call: Call, places: Sequence[Sequence[Tensor]]) -> bool:
    """LAMB in one launch for each sixty entries; ``False`` if this GPU has too little shared memory for it."""
    machine = cuda_launch.machine_of(places[0][0])
    tuning = machine.tunings.lamb_stream
    kernel = machine.kernel("lamb_stream.cu", "lamb_stream", _stream_macros(tuning, tuple(map(dtype_number, places))))
    threads = tuning.threads + 32  # one more warp
    slots, grid = _slots(machine, kernel, tuning, threads)
    if not grid:
        return False
    rule = _rule(call)
    for table in tables(call, places, tuning):
        blocks = min(grid, table.tiles)
        counters = machine.counters(2 * table.entries * blocks)
        table.extra[:2] = (slots, counters.launch)
        arguments = [table, rule, ctypes.c_uint64(counters.messages_at)]
        machine.launch(kernel, blocks, threads, arguments, slots * tuning.tile * 4, cooperative=True)
    return True


def _rule(call: Call) -> Any:
    """``struct Lamb`` of rules.cuh."""
    _, beta1, beta2, eps, weight_decay, *_ = call.scalars
    both = (eps, 0) if call.flags & EPS_INSIDE else (0, eps)
    return (ctypes.c_float * 7)(beta1, 1 - beta1, beta2, 1 - beta2, *both, weight_decay)


def _stream_macros(tuning: Tuning, dtypes: tuple[int, ...]) -> Macros:
    return macros_of(tuning, (("DS_HELD", tuning.held),), dtypes)


def _fused_macros(tuning: Tuning, dtypes: tuple[int, ...]) -> Macros:
    return macros_of(tuning, (("DS_AHEAD", AHEAD), ("DS_HELD", tuning.held)), dtypes)


def _fused(call: Call, places: Sequence[Sequence[Tensor]]) -> bool:
    """LAMB in one launch for each sixty entries; ``False`` if this GPU has too little shared memory for it."""
    machine = cuda_launch.machine_of(places[0][0])
    tuning = machine.tunings.lamb_fused
    kernel = machine.kernel("lamb_fused.cu", "lamb_fused", _fused_macros(tuning, tuple(map(dtype_number, places))))
    slots, grid = _slots(machine, kernel, tuning, tuning.threads)
    if slots <= 2 * AHEAD or not grid:
        return False
    launches = list(tables(call, places, tuning))
    device = places[0][0].device
    groups = [_group(table, (slots + tuning.held - AHEAD) * grid) for table in launches]
    parts = torch.empty(2 * max((table.tiles for table in launches), default=0), dtype=torch.float64, device=device)
    rates = torch.empty(tuning.capacity, dtype=torch.float32, device=device)
    for table, count in zip(launches, groups, strict=True):
        counters = machine.counters()
        table.extra[:3] = (count, slots - 2 * AHEAD, counters.launch)
        pointers = [ctypes.c_uint64(memory.data_ptr()) for memory in (parts, rates, counters.memory)]
        # A grid smaller than the GPU, for little work: blocks without a tile would only come and go.
        blocks, nbytes = min(grid, table.tiles), slots * tuning.tile * 4
        machine.launch(kernel, blocks, tuning.threads, [table, *pointers], nbytes, cooperative=True)
    return True


def _slots(machine: KernelMachine, kernel: Any, tuning: Tuning, threads: int) -> tuple[int, int]:
    """How many tiles a block keeps, and how many blocks the GPU holds at once then."""
    own = 4 << 10  # of a block, for the system's use and for sums
    slots = (machine.shared_nbytes // tuning.blocks - own) // (tuning.tile * 4)
    slots = min(slots, 32 - tuning.held)  # a warp's lanes know whose they are
    resident = machine.resident(kernel, threads, slots * tuning.tile * 4) if slots > 0 else 0
    return slots, resident * machine.multiprocessors


def _group(table: Any, tiles: int) -> int:
    """Cut the entries into groups of at most ``tiles``, or of one entry with more; returns how many there are."""
    ends, begin = [], 0
    bounds = [*table.first_tile[: table.entries], table.tiles]
    for entry in range(table.entries):
        if bounds[entry + 1] - begin > tiles and bounds[entry] > begin:
            ends.append(entry)
            begin = bounds[entry]
    ends.append(table.entries)
    table.group_end[: len(ends)] = ends
    return len(ends)


def _lamb_macros(tuning: Tuning, places: Sequence[Sequence[Tensor]]) -> Macros:
    return macros_of(tuning, (), tuple(map(dtype_number, places)))
