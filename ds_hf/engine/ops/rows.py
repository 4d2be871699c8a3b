"""Rows added up by lists, rows times numbers, and the gate between the products of experts and of MLPs: kernels of
``csrc/cuda/rows.cu``, and torch's operators where those cannot run (the CPU, fp64, tensors without values).

Nothing here is differentiable, nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint64
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_hf.engine.ops import cuda, cuda_launch, library
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.cuda_launch import KernelMachine, Tuning, dtype_number

__all__ = [
    "Activation",
    "activation",
    "add_up",
    "gate",
    "gate_backward",
    "grouped_outer",
    "halves_backward",
    "weigh",
    "weigh_backward",
]

Activation = Literal["silu", "gelu", "gelu_tanh"]

TUNING = Tuning(threads=256, blocks=4)
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}  # torch's names
_WAVES = 8  # blocks launched, over those that the GPU holds at once


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("x", "other", "out", "items", "starts")),
        *((name, c_int64) for name in ("rows", "total", "width")),
    )


class _Weighed(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("x", "grad", "scale", "out", "of_scale")),
        *((name, c_int64) for name in ("rows", "width")),
    )


class _Gate(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("gates", "ups", "of_gates", "of_ups", "grad")),
        *((name, c_int64) for name in ("rows", "width", "stride", "product")),
    )


def add_up(x: Tensor, items: Tensor, starts: Tensor) -> Tensor:
    """``[places, width]``, of the dtype of ``x``: for each place the sum of rows of ``x``, in fp32 at least.

    Args:
        x: ``[n, width]``, contiguous; items: int64 ``[m]``, rows of ``x``, those of each place together.
        starts: int64 ``[places]``: where those of each place begin in ``items``.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops.ds_hf.add_rows(x, items, starts))
    return _add_up(x, items, starts)


def _add_up(x: Tensor, items: Tensor, starts: Tensor) -> Tensor:
    if not len(items) or not len(starts):
        return x.new_zeros(len(starts), x.shape[1])
    if not _by_kernel(x):
        return F.embedding_bag(items, x, starts, mode="sum")
    out = x.new_empty(len(starts), x.shape[1])
    pointers = {"items": items.data_ptr(), "starts": starts.data_ptr(), "total": len(items)}
    _launch("add_up", x, out, rows=len(starts), width=x.shape[1], **pointers)
    return out


def weigh(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale`` in the dtype of ``x``: ``[rows, width]`` and ``[rows, 1]``, contiguous; of a dtype each."""
    if not _by_kernel(x) or not _by_kernel(scale) or not len(x):
        return (x * scale).to(x.dtype)
    out = torch.empty_like(x)
    _launch_weighed("weigh", scale, x=x, out=out)
    return out


def weigh_backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``scale``, from ``grad`` of what ``weigh`` gave of them, ``[rows, width]``, contiguous
    and of the dtype of ``x``; the latter is a sum over the width, in fp32 at least."""
    if not _by_kernel(x) or not _by_kernel(scale) or not len(x):
        wide = torch.promote_types(x.dtype, scale.dtype)
        return (grad * scale).to(x.dtype), (grad.to(wide) * x).sum(1, keepdim=True).to(scale.dtype)
    of_x, of_scale = torch.empty_like(x), torch.empty_like(scale)
    _launch_weighed("weigh_backward", scale, x=x, grad=grad, out=of_x, of_scale=of_scale)
    return of_x, of_scale


def gate(x: Tensor) -> Tensor:
    """``silu(gates) * ups``, ``[rows, width]``, of ``x``: ``[rows, 2 * width]`` of a dtype, contiguous, gates first."""
    if not _by_kernel(x) or not len(x):
        gates, ups = x.chunk(2, -1)
        return F.silu(gates) * ups
    out = x.new_empty(len(x), x.shape[1] // 2)
    _launch("gate", x, out, rows=len(x), width=out.shape[1])
    return out


def gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x``, from ``grad`` of what ``gate`` gave of it, ``[rows, width]``, contiguous; of one dtype."""
    if not _by_kernel(x) or not len(x):
        gates, ups = x.chunk(2, -1)
        of_gates = torch.ops.aten.silu_backward(grad * ups, gates)
        return torch.cat([of_gates, grad * F.silu(gates)], -1)
    out, width = torch.empty_like(x), grad.shape[1]
    _launch_gate(grad, x, x[:, width:], out, out[:, width:], stride=2 * width, product=0)
    return out


def activation(act: Activation, x: Tensor) -> Tensor:
    """``act(x)``, of any shape and dtype."""
    return F.silu(x) if act == "silu" else F.gelu(x, approximate=_APPROXIMATE[act])


def halves_backward(grad: Tensor, gates: Tensor, ups: Tensor, act: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``gates`` and ``ups``, and ``act(gates) * ups`` again, which may have the memory of ``grad``.

    Args:
        grad: of that product; it may be overwritten. All are ``[rows, width]``, contiguous, of one dtype.
    """
    if not _by_kernel(grad) or not len(grad):
        value, of_act = activation(act, gates), grad * ups
        if act == "silu":
            of_gates = torch.ops.aten.silu_backward(of_act, gates)
        else:
            of_gates = torch.ops.aten.gelu_backward(of_act, gates, approximate=_APPROXIMATE[act])
        return of_gates, grad * value, value * ups
    of_gates, of_ups = torch.empty_like(grad), torch.empty_like(grad)
    _launch_gate(grad, gates, ups, of_gates, of_ups, stride=grad.shape[1], product=1, act=act)
    return of_gates, of_ups, grad


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``left.T @ right`` of each group's rows, ``[groups, n, m]``, of their dtype: one that grouped products know.

    In a compiled graph it is an operator of its own: inductor would lay ``left.T`` out with the rows side by side,
    and the product of such ends the process on a GPU, unless the rows of each group fill vectors (torch 2.11).

    Args:
        left: ``[rows, n]``, right: ``[rows, m]``, contiguous; ends: int32 ``[groups]``: where the rows of each end.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.ops.ds_hf.grouped_outer(left, right, ends))
    return _grouped_outer(left, right, ends)


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    multiply: Any = torch.nn.functional.grouped_mm
    return cast(Tensor, multiply(left.mT, right, offs=ends))


def _empty_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(len(ends), left.shape[1], right.shape[1])


library.define(
    "add_rows",
    "(Tensor x, Tensor items, Tensor starts) -> Tensor",
    _add_up,
    (),
    lambda x, items, starts: x.new_empty(len(starts), x.shape[1]),
)
library.define("grouped_outer", "(Tensor left, Tensor right, Tensor ends) -> Tensor", _grouped_outer, (), _empty_outer)


def _by_kernel(x: Tensor) -> bool:
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and narrow and not torch.compiler.is_compiling() and cuda.available() is None


def _launch(name: str, x: Tensor, out: Tensor, **more: int) -> None:
    _start(name, x, _Rows(x=x.data_ptr(), out=out.data_ptr(), **more))


def _launch_weighed(name: str, scale: Tensor, x: Tensor, **more: Tensor) -> None:
    places = {key: tensor.data_ptr() for key, tensor in {"x": x, "scale": scale, **more}.items()}
    args = _Weighed(**places, rows=len(x), width=x.shape[1])
    _start(name, x, args, (("DS_OTHER", dtype_number([scale])),))


def _launch_gate(
    grad: Tensor,
    gates: Tensor,
    ups: Tensor,
    of_gates: Tensor,
    of_ups: Tensor,
    stride: int,
    product: int,
    act: Activation = "silu",
) -> None:
    places = (tensor.data_ptr() for tensor in (gates, ups, of_gates, of_ups, grad))
    args = _Gate(*places, *grad.shape, stride, product)
    _start("gate_backward", grad, args, () if act == "silu" else (("DS_GATE", 1 + (act == "gelu_tanh")),))


def _start(name: str, x: Tensor, args: Any, own: Macros = ()) -> None:
    machine: KernelMachine = cuda_launch.machine_of(x)
    kernel = machine.kernel("rows.cu", name, (*TUNING.macros, ("DS_VALUE", dtype_number([x])), *own))
    wanted = -(-(args.rows * -(-args.width // 8)) // TUNING.threads)
    machine.launch(kernel, min(wanted, machine.multiprocessors * TUNING.blocks * _WAVES), TUNING.threads, [args])
