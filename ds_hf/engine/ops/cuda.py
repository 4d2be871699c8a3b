"""The rules of reference.py on NVIDIA GPUs: which kernel of ``csrc/cuda`` a call needs, and its launches.

Arguments were checked by library.py. Nothing here waits for the GPU. Workspaces come from torch's caching allocator in
each call, so calls may be captured in CUDA graphs and made on any stream. Kernels are compiled at their first use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ds_hf.dtypes import name_of
from ds_hf.engine.ops import cuda_build, cuda_launch
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.cuda_lamb import lamb_, lamb_apply_, lamb_moments_
from ds_hf.engine.ops.cuda_launch import (
    BIAS_CORRECTION,
    DECOUPLED,
    FIRST,
    NESTEROV,
    Call,
    Tuning,
    call_of,
    dtype_number,
    grid_of,
    macros_of,
    new_table,
    tables,
)

__all__ = [
    "adagrad_",
    "adam_",
    "available",
    "clip_control",
    "lamb_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "norm_control",
    "sgd_",
    "squared_norm",
    "sum_parts_",
    "unsupported",
]

Rate = float | Tensor


def available() -> str | None:
    """``None`` if kernels compile and load for the current GPU, else why not, in one line; cheap but for the first."""
    return _failure(torch.cuda.current_device()) if _has_cuda() else "no CUDA device"


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None


@functools.cache
def _failure(index: int) -> str | None:
    if reason := cuda_build.missing():
        return reason
    try:
        machine = cuda_launch.gpu(index)
        machine.kernel("norm.cu", "gradient_norm", _norm_macros(machine.tunings.norm, 0))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        wanted = [line for line in lines if "error:" in line] or lines
        return f"{'NVRTC failed' if 'nvrtc' in str(error).lower() else 'kernels do not load'}: {wanted[0]}"
    return None


def unsupported(op: str, *dtypes: torch.dtype) -> str | None:
    """Why tensors of ``dtypes`` are not for this module; ``None`` if they are."""
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the CUDA kernel of {op} takes float32, bfloat16 and float16, not {name_of(dtype)}"
    return None


# -- Adam, Lion, Adagrad, SGD -------------------------------------------------------------------------------------


def adam_(
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
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    seed: int | None = None,
) -> None:
    """``reference.adam_``."""
    call = call_of(lr, (beta1, beta2, eps, weight_decay), scale_and_skip, steps, seed)
    call.flags = DECOUPLED * decoupled | BIAS_CORRECTION * bias_correction
    _update("Adam", call, (params, grads, outs, exp_avgs, exp_avg_sqs), seed is not None)


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    """``reference.lion_``."""
    call = call_of(lr, (beta1, beta2, weight_decay), scale_and_skip, (), seed)
    _update("Lion", call, (params, grads, outs, exp_avgs), seed is not None)


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    """``reference.adagrad_``."""
    call = call_of(lr, (lr_decay, eps, weight_decay), scale_and_skip, steps, seed)
    _update("Adagrad", call, (params, grads, outs, sums), seed is not None)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
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
    call = call_of(lr, (momentum, dampening, weight_decay), scale_and_skip, (), seed)
    call.flags = NESTEROV * nesterov | FIRST * first
    places = (params, grads, outs, momentum_buffers) if momentum else (params, grads, outs)
    _update("Sgd", call, places, seed is not None)


def _update(rule: str, call: Call, places: Sequence[Sequence[Tensor]], stochastic: bool) -> None:
    if not places[0]:
        return
    machine = cuda_launch.machine_of(places[0][0])
    tuning = machine.tunings.update.holding(len(places[0]))
    early = call.scale_and_skip is not None and machine.starts_early()  # beside the norm
    own = (("DS_RULE", rule), ("DS_STOCHASTIC", int(stochastic)), ("DS_AFTER", int(early)))
    macros = macros_of(tuning, own, tuple(map(dtype_number, places)))
    kernel = machine.kernel("update.cu", "update", macros)
    for table in tables(call, places, tuning):
        table.extra[0] = machine.multiprocessors * tuning.blocks
        machine.launch(kernel, grid_of(machine, tuning, table.tiles), tuning.threads, [table], early=early)


# -- norm ---------------------------------------------------------------------------------------------------------


_CONTROL, _CHECKED = 1, 2  # as in norm.cu


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """``reference.squared_norm``; the same bits each time on one kind of GPU."""
    result = torch.empty((), dtype=torch.float32, device=tensors[0].device)
    _norm(Call(), tensors, result)
    return result


def norm_control(tensors: Sequence[Tensor], *, scale: float, max_norm: float, checked: bool) -> Tensor:
    """``reference.norm_control``, in the launch of the norm."""
    result = torch.empty(3, dtype=torch.float32, device=tensors[0].device)
    _norm(_control_call(scale, max_norm, checked), tensors, result)
    return result


def clip_control(squares: Sequence[Tensor], *, scale: float, max_norm: float, checked: bool) -> Tensor:
    """``reference.clip_control``, in one launch."""
    result = torch.empty(3, dtype=torch.float32, device=squares[0].device)
    total = squares[0] if len(squares) == 1 else torch.stack([square.reshape(()) for square in squares]).sum()
    _write_control(_control_call(scale, max_norm, checked), total.data_ptr(), result)
    return result


def _control_call(scale: float, max_norm: float, checked: bool) -> Call:
    return Call((scale, max_norm), _CONTROL | _CHECKED * checked)


def _write_control(call: Call, squares: int, result: Tensor) -> None:
    machine = cuda_launch.machine_of(result)
    tuning = machine.tunings.norm
    table = new_table(call, tuning)
    arguments = (table, ctypes.c_uint64(squares), ctypes.c_uint64(result.data_ptr()))
    machine.launch(machine.kernel("norm.cu", "clip_control", _norm_macros(tuning, 0)), 1, 32, arguments)


def _norm(call: Call, tensors: Sequence[Tensor], result: Tensor) -> None:
    machine = cuda_launch.machine_of(result)
    dtype = dtype_number(tensors)
    shape = machine.tunings.norm.holding(len(tensors))
    if sum(map(Tensor.numel, tensors)) < 2 * machine.multiprocessors * _norm_tuning(shape, dtype).tile:
        shape = _with_small_tiles(shape)
    tuning, macros = _norm_tuning(shape, dtype), _norm_macros(shape, dtype)
    launches = list(tables(call, (tensors,), tuning))
    if not launches:
        _write_control(call, 0, result)
        return
    grids = [grid_of(machine, tuning, table.tiles) for table in launches]
    kernel, first = machine.kernel("norm.cu", "gradient_norm", macros), 0
    counters = machine.counters(sum(grids))
    addresses = (counters.messages_at, result.data_ptr())
    for table, grid in zip(launches, grids, strict=True):
        table.extra[:3] = first, sum(grids) if table is launches[-1] else 0, counters.launch
        arguments = (table, *map(ctypes.c_uint64, addresses))
        machine.launch(kernel, grid, tuning.threads, arguments)
        first += grid


@functools.cache
def _norm_tuning(tuning: Tuning, dtype: int) -> Tuning:
    """Vectors stay as many bytes for 16-bit elements as for fp32."""
    return replace(tuning, vec=tuning.vec * (2 if dtype else 1))


@functools.cache
def _with_small_tiles(tuning: Tuning) -> Tuning:
    """So that little work reaches the whole GPU."""
    return replace(tuning, groups=1)


@functools.cache
def _norm_macros(tuning: Tuning, dtype: int) -> Macros:
    return (*_norm_tuning(tuning, dtype).macros, ("DS_GRAD", dtype))


# -- sum ----------------------------------------------------------------------------------------------------------


def sum_parts_(
    out: Tensor,
    mine: Sequence[Tensor],
    before: Tensor | None,
    rows: Tensor,
    *,
    cuts: Sequence[int],
    place: int,
    factor: float,
) -> None:
    """``reference.sum_parts_``."""
    machine = cuda_launch.machine_of(rows)
    numbers = dtype_number(mine), dtype_number([out]), dtype_number([] if before is None else [before])
    tuning = _norm_tuning(machine.tunings.sum.holding(len(cuts) // 5), numbers[0])
    kernel = machine.kernel("sum.cu", "sum_parts", _sum_macros(tuning, *numbers))
    wide, size = out.itemsize, rows.itemsize
    to, row, own = out.data_ptr(), rows.data_ptr(), [tensor.data_ptr() for tensor in mine]
    added, width = (0, 0) if before is None else (before.data_ptr(), before.itemsize)
    chosen = [cut for cut in zip(*[iter(cuts)] * 5, strict=True) if cut[4]]
    for first in range(0, len(chosen), tuning.capacity):
        some = chosen[first : first + tuning.capacity]
        count, tiles = len(some), [-(-cut[4] // tuning.tile) for cut in some]
        table = new_table(Call((factor,)), tuning, sum(tiles), count, first)
        table.workspace = rows.shape[1]
        table.extra[:2] = rows.shape[0] + 1, place
        table.numel[:count] = [length for *_, length in some]
        table.first_tile[:count] = list(accumulate(tiles[:-1], initial=0))
        table.pointers[0][:count] = [to + wide * begin for _, _, begin, _, _ in some]
        table.pointers[1][:count] = [own[index] + size * begin for index, begin, _, _, _ in some]
        table.pointers[2][:count] = [row + size * begin for _, _, _, begin, _ in some]
        table.pointers[3][:count] = [added + width * begin for _, _, begin, _, _ in some]
        machine.launch(kernel, grid_of(machine, tuning, table.tiles), tuning.threads, [table])


@functools.cache
def _sum_macros(tuning: Tuning, parts: int, out: int, before: int) -> Macros:
    return (*tuning.macros, ("DS_GRAD", parts), ("DS_OUT", out), ("DS_FIRST", before))
