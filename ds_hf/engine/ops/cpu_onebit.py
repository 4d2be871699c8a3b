"""The passes of onebit.py on the CPU: the library of ``csrc/cpu``, called through ctypes.

Owns the mirror of ``csrc/cpu/ds_hf_onebit.h``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int32

from torch import Tensor

from ds_hf.engine.ops import cpu

__all__ = ["Numbers", "apply_", "available", "values_"]

ABI = 1


class Numbers(ctypes.Structure):
    """``ds_hf_onebit``."""

    _fields_ = (
        *((name, c_double) for name in ("lr", "beta1", "eps", "weight_decay")),
        ("eps_inside_sqrt", c_int32),
    )


@functools.cache
def available() -> str | None:
    """``None`` if the library has these functions, else why not."""
    reason = cpu.available()
    if reason is not None:
        return reason
    library = cpu.loaded()
    try:
        found = library.ds_hf_cpu_onebit_abi()
    except AttributeError:
        found = 0
    if found != ABI:
        return f"the C++ library belongs to another version of ds_hf (1 bit {found}, not {ABI}): reinstall ds_hf"
    library.ds_hf_cpu_onebit_values.argtypes = [POINTER(cpu.Lists), POINTER(Numbers)]
    library.ds_hf_cpu_onebit_apply.argtypes = [POINTER(cpu.Lists), POINTER(Numbers)]
    return None


def values_(
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    seconds: Sequence[Tensor],
    floors: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    numbers: Numbers,
) -> None:
    lists = cpu.lists_of(values, grads, momenta, seconds, (), floors, scale_and_skip, None)
    status = cpu.loaded().ds_hf_cpu_onebit_values(byref(lists), byref(numbers))
    assert status == 0, f"to_values_: the library refuses its arguments ({status})"


def apply_(
    params: Sequence[Tensor],
    means: Sequence[Tensor],
    momenta: Sequence[Tensor],
    seconds: Sequence[Tensor],
    outs: Sequence[Tensor],
    floors: Sequence[Tensor],
    numbers: Numbers,
) -> None:
    lists = cpu.lists_of(params, means, momenta, seconds, outs, floors, None, None)
    status = cpu.loaded().ds_hf_cpu_onebit_apply(byref(lists), byref(numbers))
    assert status == 0, f"apply_means_: the library refuses its arguments ({status})"
