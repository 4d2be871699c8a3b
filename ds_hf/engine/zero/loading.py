"""``load_state_dict`` on a model in training: whole tensors go into shards and masters, a unit at a time.

Peak memory on the device: the root's unit and one other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ds_hf.engine.zero.buffer import BufferState, unshard
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.unit import Unit

__all__ = ["loadable", "own_parts", "refuse_load"]


def own_parts(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with this process's part where a parameter is whole in it and cut here; all else stays as it is."""
    own = dict(state)
    for name, param in module.named_parameters(remove_duplicate=False):
        value, cut = own.get(name), cut_of(param)
        if cut is not None and isinstance(value, Tensor) and value.shape == cut.whole:
            own[name] = cut.take(value)
    return own


@contextmanager
def loadable(units: Sequence[Unit]) -> Iterator[None]:
    """Inside, ``load_state_dict`` of the model, or of a part of it, reaches the shards and masters. Collective."""
    handles: list[Any] = []
    opened: list[AbstractContextManager[None]] = []
    for unit in units:
        unit.loading = True
        modules: list[Any] = unit.modules
        for module in modules:
            handles.append(module.register_load_state_dict_pre_hook(partial(_open, unit, opened)))
            handles.append(module.register_load_state_dict_post_hook(partial(_close, unit, opened)))
    try:
        yield
    finally:
        for unit in units:
            unit.loading = False
        for handle in handles:
            handle.remove()


def _open(unit: Unit, opened: list[AbstractContextManager[None]], *_: Any) -> None:
    context = unshard(unit.buffers)
    context.__enter__()
    opened.append(context)


def _close(unit: Unit, opened: list[AbstractContextManager[None]], *_: Any) -> None:
    for buffer in unit.buffers:
        buffer.write_back()
    opened.pop().__exit__(None, None, None)


def refuse_load(unit: Unit, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """Before torch finds that whole weights do not fit what has no elements, say why and what to call."""
    error_msgs: list[str] = rest[-1]
    if unit.loading or _HOW in error_msgs:
        return
    away = [buffer for buffer in unit.buffers if buffer.sharded and buffer.state is not BufferState.GATHERED]
    released = {id(param) for buffer in away for param in buffer.params}
    names = (prefix + name for name, param in module.named_parameters() if id(param) in released)
    if any(isinstance(value := state.get(name), Tensor) and value.numel() for name in names):
        error_msgs.append(_HOW)


_HOW = (
    "at ZeRO stage 3 a part of each parameter is on each process, so whole weights do not fit. Call "
    "engine.load_module_state_dict(state_dict) on all processes, or load inside "
    "`with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):`"
)
