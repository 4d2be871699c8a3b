"""The rules of reference.py on NVIDIA GPUs: which kernel of ``csrc/cuda`` a call needs, and its launches.

Arguments were checked by library.py. Nothing here waits for the GPU. Workspaces come from torch's caching allocator in
each call, so calls may be captured in CUDA graphs and made on any stream. Kernels are compiled at their first use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops import cuda_build
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.cuda_launch import NO_DTYPE, Call, Machine, Tuning, dtype_number, gpu, tables

__all__ = [
    "adagrad_",
    "adam_",
    "available",
    "lamb_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "sgd_",
    "squared_norm",
    "unsupported",
]

Rate = float | Tensor

# As in rules.cuh.
DECOUPLED, BIAS_CORRECTION, NESTEROV, FIRST, EPS_INSIDE = 1, 2, 4, 8, 16


def available() -> str | None:
    """``None`` if kernels compile and load for the current GPU, else why not, in one line."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no CUDA device"
    return cuda_build.missing() or _failure(torch.cuda.current_device())


@functools.cache
def _failure(index: int) -> str | None:
    try:
        machine = gpu(index)
        machine.kernel("norm.cu", "norm_total", _norm_macros(machine.tunings.norm, 0))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        wanted = [line for line in lines if "error" in line.lower()] or lines or [type(error).__name__]
        return f"NVRTC failed: {wanted[0]}"
    return None


def unsupported(op: str, *dtypes: torch.dtype) -> str | None:
    """Why tensors of ``dtypes`` are not for this module; ``None`` if they are."""
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            return f"the CUDA kernel of {op} takes float32, bfloat16 and float16, not {name}"
    return None


def _machine(tensor: Tensor) -> Machine:
    return gpu(tensor.get_device())


# -- Adam, Lion, Adagrad, SGD -------------------------------------------------------------------------------------


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    control: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    seed: int | None = None,
) -> None:
    """``reference.adam_``."""
    call = _call(lr, (beta1, beta2, eps, weight_decay), control, steps, seed)
    call.flags = DECOUPLED * decoupled | BIAS_CORRECTION * bias_correction
    _update("Adam", call, (params, grads, outs, exp_avgs, exp_avg_sqs), seed is not None)


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    outs: Sequence[Tensor],
    control: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    """``reference.lion_``."""
    call = _call(lr, (beta1, beta2, weight_decay), control, (), seed)
    _update("Lion", call, (params, grads, outs, exp_avgs), seed is not None)


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    control: Tensor | None,
    *,
    lr: Rate,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    """``reference.adagrad_``."""
    call = _call(lr, (lr_decay, eps, weight_decay), control, steps, seed)
    _update("Adagrad", call, (params, grads, outs, sums), seed is not None)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    outs: Sequence[Tensor],
    control: Tensor | None,
    *,
    lr: Rate,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    seed: int | None = None,
) -> None:
    """``reference.sgd_``."""
    call = _call(lr, (momentum, dampening, weight_decay), control, (), seed)
    call.flags = NESTEROV * nesterov | FIRST * first
    places = (params, grads, outs, momentum_buffers) if momentum else (params, grads, outs)
    _update("Sgd", call, places, seed is not None)


def _call(
    lr: Rate, scalars: tuple[float, ...], control: Tensor | None, steps: Sequence[Tensor], seed: int | None
) -> Call:
    rate = lr if isinstance(lr, Tensor) else None
    return Call(
        scalars=(0.0 if isinstance(lr, Tensor) else float(lr), *scalars),
        control=control,
        rate=rate,
        seed=(seed or 0) & (2**64 - 1),
        steps=steps,
    )


def _update(rule: str, call: Call, places: Sequence[Sequence[Tensor]], stochastic: bool) -> None:
    if not places[0]:
        return
    machine = _machine(places[0][0])
    tuning = machine.tunings.update
    own = (("DS_RULE", rule), ("DS_STOCHASTIC", int(stochastic)))
    macros = _macros(tuning, own, tuple(map(dtype_number, places)))
    kernel = machine.kernel("update.cu", "update", macros)
    for table in tables(call, places, tuning):
        machine.launch(kernel, _grid(machine, tuning, table.tiles), tuning.threads, [table])


@functools.cache
def _macros(tuning: Tuning, own: Macros, dtypes: tuple[int, ...]) -> Macros:
    """``dtypes`` of param, grad, out and moments."""
    names = ("DS_PARAM", "DS_GRAD", "DS_OUT", "DS_FIRST", "DS_SECOND")
    return (*tuning.macros, *own, *zip(names, (*dtypes, NO_DTYPE, NO_DTYPE), strict=False))


def _grid(machine: Machine, tuning: Tuning, tiles: int) -> int:
    return min(tiles, machine.multiprocessors * tuning.blocks * tuning.waves)


# -- norm ---------------------------------------------------------------------------------------------------------


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """``reference.squared_norm``; the same bits each time on one kind of GPU."""
    machine = _machine(tensors[0])
    dtype = dtype_number(tensors)
    tuning = _norm_tuning(machine.tunings.norm, dtype)
    macros = _norm_macros(machine.tunings.norm, dtype)
    launches = list(tables(Call(), (tensors,), tuning))
    grids = [_grid(machine, tuning, table.tiles) for table in launches]
    device = tensors[0].device
    result = torch.empty((), dtype=torch.float32, device=device)
    parts = torch.empty(sum(grids), dtype=torch.float64, device=device)
    at = parts.data_ptr()
    for table, grid in zip(launches, grids, strict=True):
        table.workspace = at
        machine.launch(machine.kernel("norm.cu", "norm_parts", macros), grid, tuning.threads, [table])
        at += 8 * grid
    arguments = (ctypes.c_uint64(parts.data_ptr()), ctypes.c_uint32(sum(grids)), ctypes.c_uint64(result.data_ptr()))
    machine.launch(machine.kernel("norm.cu", "norm_total", macros), 1, tuning.threads, arguments)
    return result


@functools.cache
def _norm_tuning(tuning: Tuning, dtype: int) -> Tuning:
    """Vectors stay as many bytes for 16-bit elements as for fp32."""
    values = {**vars(tuning), "vec": tuning.vec * (2 if dtype else 1)}
    return Tuning(**values)


@functools.cache
def _norm_macros(tuning: Tuning, dtype: int) -> Macros:
    return (*_norm_tuning(tuning, dtype).macros, ("DS_GRAD", dtype))


# -- LAMB ---------------------------------------------------------------------------------------------------------


def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    control: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
) -> Tensor:
    """``reference.lamb_moments_``; the same bits each time on one kind of GPU."""
    if not params:
        return torch.zeros(0, 2)
    call = _call(0.0, (beta1, beta2, eps, weight_decay), control, (), None)
    call.flags = EPS_INSIDE * eps_inside_sqrt
    places = (params, grads, (), exp_avgs, exp_avg_sqs)
    machine = _machine(params[0])
    tuning = machine.tunings.lamb
    kernel, total = (machine.kernel("lamb.cu", name, _lamb_macros(tuning, places)) for name in _FIRST_PASS)
    launches = list(tables(call, places, tuning))
    device, complete = params[0].device, sum(table.entries for table in launches) == len(params)
    norms = (torch.empty if complete else torch.zeros)(len(params), 2, dtype=torch.float32, device=device)
    parts = torch.empty(2 * max((table.tiles for table in launches), default=0), dtype=torch.float64, device=device)
    for table in launches:
        grid = _grid(machine, tuning, table.tiles)
        table.workspace = parts.data_ptr()
        machine.launch(kernel, grid, tuning.threads, [table])
        arguments = (table, ctypes.c_uint32(grid), ctypes.c_uint64(norms.data_ptr()))
        machine.launch(total, table.entries, tuning.threads, arguments)
    return norms


_FIRST_PASS = ("lamb_moments", "lamb_norms")


def lamb_apply_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    norms: Tensor,
    control: Tensor | None,
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
    call = _call(lr, (beta1, beta2, eps, weight_decay, min_coeff, max_coeff), control, steps, None)
    call.flags = EPS_INSIDE * eps_inside_sqrt | BIAS_CORRECTION * bias_correction
    places = (params, (), outs, exp_avgs, exp_avg_sqs)
    machine = _machine(params[0])
    tuning = machine.tunings.lamb
    kernel = machine.kernel("lamb.cu", "lamb_apply", _lamb_macros(tuning, places))
    for table in reversed(list(tables(call, places, tuning))):
        arguments = (table, ctypes.c_uint64(norms.data_ptr()))
        machine.launch(kernel, _grid(machine, tuning, table.tiles), tuning.threads, arguments)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    control: Tensor | None,
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
    call = _call(lr, (beta1, beta2, eps, weight_decay, min_coeff, max_coeff), control, steps, None)
    call.flags = EPS_INSIDE * eps_inside_sqrt | BIAS_CORRECTION * bias_correction
    places = (params, grads, outs, exp_avgs, exp_avg_sqs)
    machine = _machine(params[0])
    tuning = machine.tunings.lamb_fused
    own = (("DS_AHEAD", AHEAD),)
    kernel = machine.kernel("lamb_fused.cu", "lamb_fused", _macros(tuning, own, tuple(map(dtype_number, places))))
    slots, grid = _slots(machine, kernel, tuning)
    launches = list(tables(call, places, tuning))
    for table in launches:
        _group(table, (slots - AHEAD) * grid)
        table.extra[1] = slots - 2 * AHEAD
    _launch_fused(machine, kernel, launches, slots, grid, params[0].device)


def _launch_fused(
    machine: Machine, kernel: Any, launches: Sequence[Any], slots: int, grid: int, device: torch.device
) -> None:
    tuning = machine.tunings.lamb_fused
    parts = torch.empty(2 * max((table.tiles for table in launches), default=0), dtype=torch.float64, device=device)
    rates = torch.empty(tuning.capacity, dtype=torch.float32, device=device)
    counters = torch.zeros(2 * sum(table.extra[0] for table in launches), dtype=torch.int32, device=device)
    at = counters.data_ptr()
    for table in launches:
        pointers = [ctypes.c_uint64(pointer) for pointer in (parts.data_ptr(), rates.data_ptr(), at)]
        # A grid smaller than the GPU, for little work: blocks without a tile would only come and go.
        blocks, nbytes = min(grid, table.tiles), slots * tuning.tile * 4
        machine.launch(kernel, blocks, tuning.threads, [table, *pointers], nbytes, cooperative=True)
        at += 8 * table.extra[0]


AHEAD = 1  # tiles that a block begins of the next group before it waits for the rates of one


def _slots(machine: Machine, kernel: Any, tuning: Tuning) -> tuple[int, int]:
    """How many tiles a block keeps, and how many blocks the GPU holds at once then."""
    own = 2 << 10  # of a block, for the system's use and for sums
    slots = (machine.shared_nbytes // tuning.blocks - own) // (tuning.tile * 4)
    resident = machine.resident(kernel, tuning.threads, slots * tuning.tile * 4)
    return slots, resident * machine.multiprocessors


def _group(table: Any, tiles: int) -> None:
    """Cut the entries into groups of at most ``tiles``, or of one entry with more."""
    ends, begin = [], 0
    bounds = [*table.first_tile[: table.entries], table.tiles]
    for entry in range(table.entries):
        if bounds[entry + 1] - begin > tiles and bounds[entry] > begin:
            ends.append(entry)
            begin = bounds[entry]
    ends.append(table.entries)
    table.extra[0] = len(ends)
    table.group_end[: len(ends)] = ends


def _lamb_macros(tuning: Tuning, places: Sequence[Sequence[Tensor]]) -> Macros:
    return _macros(tuning, (), tuple(map(dtype_number, places)))
