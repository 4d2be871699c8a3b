"""The rules of reference.py on NVIDIA GPUs: which kernel of ``csrc/cuda`` a call needs, and its launches.

Arguments were checked by library.py. Nothing here waits for the GPU. Workspaces come from torch's caching allocator in
each call, so calls may be captured in CUDA graphs and made on any stream. Kernels are compiled at their first use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hf.engine.ops import cuda_build
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.cuda_launch import Call, Machine, Tuning, dtype_number, gpu, tables

__all__ = [
    "adagrad_",
    "adam_",
    "available",
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
    macros = _update_macros(tuning, rule, tuple(map(dtype_number, places)), stochastic)
    kernel = machine.kernel("update.cu", "update", macros)
    for table in tables(call, places, tuning):
        machine.launch(kernel, _grid(machine, tuning, table.tiles), tuning.threads, [table])


@functools.cache
def _update_macros(tuning: Tuning, rule: str, dtypes: tuple[int, ...], stochastic: bool) -> Macros:
    """``dtypes`` of param, grad, out and moments."""
    names = ("DS_PARAM", "DS_GRAD", "DS_OUT", "DS_FIRST", "DS_SECOND")
    own = (("DS_RULE", rule), ("DS_STOCHASTIC", int(stochastic)))
    return (*tuning.macros, *own, *zip(names, (*dtypes, 3, 3), strict=False))


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
