"""The block formats of reference_blocks.py on NVIDIA GPUs: the launches of ``csrc/cuda/blocks.cu``.

Arguments were checked by blocks.py. Nothing here waits for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int64, c_uint64

from torch import Tensor

from ds_hf.engine.ops import cuda, cuda_launch
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.cuda_launch import KernelMachine, Tuning, dtype_number

__all__ = ["available", "from_blocks_", "to_blocks_"]

TUNING = Tuning(threads=256, blocks=4)
_WAVES = 4  # blocks launched, over those that the GPU holds at once

available = cuda.available


class _Blocks(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("values", "other", "blocks")),
        *((name, c_int64) for name in ("rows", "numel", "row_nbytes", "summed")),
        *((name, c_float) for name in ("factor", "gain", "beta", "unused")),
    )


def to_blocks_(
    out: Tensor, values: Tensor, feedback: Tensor | None, *, bits: int, block: int, gain: float = 1.0, beta: float = 0.0
) -> None:
    """``reference_blocks.to_blocks_``, a warp for each block."""
    args = _args(values, feedback, out)
    args.gain, args.beta = gain, beta
    warps = len(values) * -(-values.shape[1] // block)
    _launch("to_blocks", args, values, feedback, (bits, block), -(-warps * 32 // TUNING.threads))


def from_blocks_(
    out: Tensor, blocks: Tensor, before: Tensor | None, *, bits: int, block: int, factor: float = 1.0
) -> None:
    """``reference_blocks.from_blocks_``, a thread for each eight elements."""
    args = _args(out, before, blocks)
    args.factor, args.summed = factor, len(blocks) // len(out)
    threads = len(out) * -(-out.shape[1] // 8)
    _launch("from_blocks", args, out, before, (bits, block), -(-threads // TUNING.threads))


def _args(values: Tensor, other: Tensor | None, blocks: Tensor) -> _Blocks:
    return _Blocks(
        values=values.data_ptr(),
        other=0 if other is None else other.data_ptr(),
        blocks=blocks.data_ptr(),
        rows=values.shape[0],
        numel=values.shape[1],
        row_nbytes=blocks.shape[1],
    )


def _launch(name: str, args: _Blocks, values: Tensor, other: Tensor | None, form: tuple[int, int], wanted: int) -> None:
    machine: KernelMachine = cuda_launch.machine_of(values)
    numbers = dtype_number([values]), dtype_number([] if other is None else [other])
    kernel = machine.kernel("blocks.cu", name, macros_of(*form, *numbers))
    grid = min(wanted, machine.multiprocessors * TUNING.blocks * _WAVES)
    machine.launch(kernel, grid, TUNING.threads, [args])


@functools.cache
def macros_of(bits: int, block: int, value: int, other: int) -> Macros:
    """What the kernels of a format are compiled with; dtypes as ``core.cuh`` numbers them."""
    return (*TUNING.macros, ("DS_BITS", bits), ("DS_BLOCK", block), ("DS_VALUE", value), ("DS_OTHER", other))
