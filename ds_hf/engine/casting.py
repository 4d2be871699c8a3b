"""Dtypes at the engine's edges: autocast and casts of inputs around its forward, and the model's buffers.

Invariant: inside ``engine(...)`` autocast is what the configuration asks for, whatever the caller opened around it, so
that the gradients have the range and the dtype that the reductions expect. Recomputations under activation
checkpointing take it over from the forward that they repeat: torch's checkpoints do that.
"""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ds_hf.config.plan import StatePlan, dtype_name
from ds_hf.config.types import DataTypesSection
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.fp32_buffers import (
    buffers_to_keep_in_fp32,
    keep_buffers_in_fp32,
    keep_in_fp32_pattern,
    regular,
)
from ds_hf.log import log_once, warn_once

__all__ = ["autocast_of", "cast_floats", "hint_at_buffers", "place_buffers", "set_buffer_dtypes"]

_MISMATCH = re.compile(r"dtype|scalar type")  # in what torch says when an operation gets several


def autocast_of(plan: StatePlan, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which an engine of this plan runs its module.

    Where parameters are sharded nothing is cached: a weight's 16-bit copy would stay until forward ends, of all units
    at once.
    """
    kind, name = device.type, plan.autocast
    inside = torch.is_autocast_enabled(kind)
    if name is None:
        if not inside:
            return nullcontext()
        warn_once(
            "torch.autocast is active around a call of the engine, and is switched off inside: the configuration has "
            'no torch_autocast. Its fp16 and bf16 blocks decide alone; for autocast add "torch_autocast": '
            '{"enabled": true, "dtype": "bf16"}'
        )
        return torch.autocast(kind, enabled=False)
    if inside:
        log_once("torch.autocast around a call of the engine gives way to the configuration's torch_autocast")
        torch.clear_autocast_cache()  # it may hold casts of weights from before the last step
    return torch.autocast(kind, dtype=getattr(torch, name), cache_enabled=not plan.shards_parameters)


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
def set_buffer_dtypes(model: nn.Module, types: DataTypesSection, dtype: torch.dtype | None) -> None:
    """What ``data_types`` makes of the buffers of a model of ``dtype``, in place; fp8 stays as it is.

    Buffers keep the dtype in which they came, as in DeepSpeed since 0.19.7, or take ``buffer_dtype``, but for those
    that stay in fp32 (``zero/fp32_buffers.py``). Running statistics take the parameters' dtype, for torch's batch norm
    refuses to mix them.
    """
    if dtype is None:
        return
    wanted = dtype_name(types.buffer_dtype)
    asked = getattr(torch, wanted) if wanted else None
    pattern = keep_in_fp32_pattern(model, types.keep_in_fp32_modules, dtype)
    kept = set()
    if pattern is not None:
        _tell_unmatched(model, types.keep_in_fp32_modules)
        keep_buffers_in_fp32(model, pattern)
        kept = {id(buffer) for buffer in buffers_to_keep_in_fp32(model, pattern)}
    for module in model.modules():
        follows = dtype if isinstance(module, _NormBase) else None
        for buffer in module.buffers(recurse=False):
            target = follows or asked
            wide = buffer.is_floating_point() and buffer.dtype.itemsize > 1
            if target is not None and wide and id(buffer) not in kept:
                buffer.data = buffer.data.to(target)


def _tell_unmatched(model: nn.Module, setting: str | tuple[str, ...]) -> None:
    for name in () if isinstance(setting, str) else setting:
        if not buffers_to_keep_in_fp32(model, re.compile(regular(name))):
            warn_once(
                f"data_types.keep_in_fp32_modules: {name!r} is in no name of a buffer here, and has no effect. "
                "Parameters follow the model, as in DeepSpeed"
            )


def hint_at_buffers(error: RuntimeError, model: nn.Module, dtype: torch.dtype | None) -> None:
    """If a forward failed for dtypes and there are wider buffers, tell that with ``error``."""
    if dtype is None or not _MISMATCH.search(str(error)):
        return
    named = model.named_buffers()
    wide = [name for name, value in named if value.is_floating_point() and value.dtype.itemsize > dtype.itemsize]
    if wide and sys.version_info >= (3, 11):
        error.add_note(
            f"ds_hf: the parameters are {dtype}; buffers keep the dtype in which they were loaded, which is wider for "
            f"{', '.join(wide[:4])}{' and others' if len(wide) > 4 else ''}. If the model does not cast what it "
            'computes with them, set "data_types": {"buffer_dtype": "bf16"} (or "fp16") in the configuration.'
        )


@torch.no_grad()
def place_buffers(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Put the model's buffers on ``device``, with rank 0's values. What modules share stays shared."""
    found: dict[int, tuple[Tensor, Tensor]] = {}  # what was there stays alive: no other tensor gets its id
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in found:
                placed = buffer.to(device=device).contiguous()
                found[id(buffer)] = buffer, placed
                if placed.numel():  # as bytes: backends lack some dtypes
                    sent = placed.reshape(-1).view(torch.uint8)
                    collectives.broadcast(sent, axis, what="a buffer of the model")
            module._buffers[name] = found[id(buffer)][1]
