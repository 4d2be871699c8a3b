"""``load_state_dict`` on a model in training: whole tensors go into shards and masters, a unit at a time.

Peak memory on the device: the root's unit and one other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from ds_hf.engine.zero.buffer import unshard
from ds_hf.engine.zero.unit import Unit

__all__ = ["loadable"]


@contextmanager
def loadable(units: Sequence[Unit]) -> Iterator[None]:
    """Inside, ``load_state_dict`` of the model, or of a part of it, reaches the shards and masters. Collective."""
    handles: list[Any] = []
    opened: list[AbstractContextManager[None]] = []
    for unit in units:
        modules: list[Any] = unit.modules
        for module in modules:
            handles.append(module.register_load_state_dict_pre_hook(partial(_open, unit, opened)))
            handles.append(module.register_load_state_dict_post_hook(partial(_close, unit, opened)))
    try:
        yield
    finally:
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
