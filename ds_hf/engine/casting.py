"""Casts between dtypes at the engine's edges: inputs of forward, and the model's buffers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis

__all__ = ["cast_floats", "place_buffers"]

# Rotary frequencies lose positions at 16 bits; the models compute with them in fp32 and cast the result themselves.
_KEPT_WIDE = ("inv_freq", "original_inv_freq")


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in nests of lists, tuples, mappings and dataclasses cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floats(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: cast_floats(getattr(value, f.name), dtype) for f in fields(value) if f.init}
        return replace(value, **changes)
    return value


@torch.no_grad()
def place_buffers(model: nn.Module, axis: Axis, device: torch.device, dtype: torch.dtype | None) -> None:
    """Put the model's buffers on ``device``, floating ones but fp8 in ``dtype`` if given, with rank 0's values."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            narrow = buffer.dtype.itemsize < 2  # fp8: scales and the like of quantized weights
            cast = dtype if buffer.is_floating_point() and name not in _KEPT_WIDE and not narrow else None
            placed = buffer.to(device=device, dtype=cast)
            if not placed.is_contiguous():
                placed = placed.contiguous()
            if placed.numel():
                sent = placed.view(torch.uint8) if narrow and placed.is_floating_point() else placed  # gloo has no fp8
                collectives.broadcast(sent, axis, what="a buffer of the model")
            module._buffers[name] = placed
