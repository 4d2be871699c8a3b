"""Digests of what a checkpoint holds besides tensors: numbers, texts and small tensors in dicts and lists.

A digest depends on values and types alone, never on the order of a dict or on how a number was pickled.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest_of", "digest_of_common", "digests_of", "moving"]


def digest_of(value: Any) -> str:
    """16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    _feed(state, value)
    return state.hexdigest()


def digests_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each value, so that a difference has a name."""
    return {key: digest_of(value) for key, value in values.items()}


def digest_of_common(common: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of what is one for all ranks."""
    scaler = common.get("loss_scaler")
    scheduler = common.get("lr_scheduler")
    return {
        "lr_scheduler": None if scheduler is None else [common.get("lr_scheduler_kind"), digest_of(moving(scheduler))],
        "loss_scaler": None if scaler is None else [scaler["kind"], digest_of(moving(scaler["state"]))],
        "data": None if common.get("data") is None else digest_of(common["data"]),
    }


def moving(state: Any) -> Any:
    """A scaler's or scheduler's state without its settings: a resumed run has those of its own configuration."""
    return {k: v for k, v in state.items() if k != "settings"} if isinstance(state, Mapping) else state


def _feed(state: Any, value: Any) -> None:
    """Every value is preceded by its kind and, where it has one, by its length: no two values give the same bytes."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dim() == 0 and not value.is_complex():
            _feed(state, value.item())
            return
        state.update(f"T{value.dtype}{tuple(value.shape)};".encode())
        state.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        state.update(f"M{len(value)};".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
            _feed(state, key)
            _feed(state, value[key])
    elif isinstance(value, list | tuple):
        state.update(f"L{len(value)};".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, set | frozenset):
        _feed(state, sorted(value, key=repr))
    elif isinstance(value, float):
        state.update(b"F" + struct.pack("<d", value))
    else:  # None, bool, int, str, dtypes, ...
        text = repr(value).encode()
        state.update(f"{type(value).__name__}{len(text)};".encode() + text)
