"""The block formats of reference_blocks.py on the CPU: the library of ``csrc/cpu``, called through ctypes.

Owns the mirror of ``csrc/cpu/ds_hf_blocks.h``. Arguments were checked by blocks.py.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p

from torch import Tensor

from ds_hf.engine.ops import cpu

__all__ = ["available", "from_blocks_", "to_blocks_"]

ABI = 1


class _Blocks(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("nbytes", "rows", "numel", "row_nbytes", "summed")),
        *((name, c_void_p) for name in ("values", "other", "blocks")),
        *((name, c_float) for name in ("factor", "gain", "beta")),
        *((name, c_int32) for name in ("bits", "block", "value_type", "other_type", "threads")),
    )


@functools.cache
def available() -> str | None:
    """``None`` if the library has these functions, else why not."""
    reason = cpu.available()
    if reason is not None:
        return reason
    library = cpu.loaded()
    try:
        found = library.ds_hf_cpu_blocks_abi()
    except AttributeError:
        found = 0
    if found != ABI:
        return f"the C++ library belongs to another version of ds_hf (blocks {found}, not {ABI}): reinstall ds_hf"
    library.ds_hf_cpu_to_blocks.argtypes = library.ds_hf_cpu_from_blocks.argtypes = [POINTER(_Blocks)]
    return None


def to_blocks_(
    out: Tensor, values: Tensor, feedback: Tensor | None, *, bits: int, block: int, gain: float = 1.0, beta: float = 0.0
) -> None:
    args = _args(values, feedback, out, bits, block)
    args.gain, args.beta = gain, beta
    status = cpu.loaded().ds_hf_cpu_to_blocks(byref(args))
    assert status == 0, f"to_blocks_: the library refuses its arguments ({status})"


def from_blocks_(
    out: Tensor, blocks: Tensor, before: Tensor | None, *, bits: int, block: int, factor: float = 1.0
) -> None:
    args = _args(out, before, blocks, bits, block)
    args.factor, args.summed = factor, len(blocks) // max(len(out), 1)
    status = cpu.loaded().ds_hf_cpu_from_blocks(byref(args))
    assert status == 0, f"from_blocks_: the library refuses its arguments ({status})"


def _args(values: Tensor, other: Tensor | None, blocks: Tensor, bits: int, block: int) -> _Blocks:
    """The struct of one call. It holds addresses: the caller's tensors must outlive it."""
    return _Blocks(
        nbytes=ctypes.sizeof(_Blocks),
        rows=values.shape[0],
        numel=values.shape[1],
        row_nbytes=blocks.shape[1],
        values=values.data_ptr(),
        other=None if other is None else other.data_ptr(),
        blocks=blocks.data_ptr(),
        bits=bits,
        block=block,
        value_type=cpu.type_number(values),
        other_type=0 if other is None else cpu.type_number(other),
        threads=cpu.threads(),
    )
