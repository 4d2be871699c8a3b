"""TRL's hash of a model, by which ``DPOTrainer(precompute_ref_log_probs=True)`` finds what it wrote for the same data.

At stage 3 it would be one of parameters at rest, alike for all weights: a run on another base took the
log-probabilities of the first, silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.buffer import buffers_of, unshard
from ds_hf.engine.zero.packed import packed_parts
from ds_hf.hf.autoload import wrap

__all__ = ["wrap_hash"]


def wrap_hash(module: ModuleType) -> None:
    """Hook of ``trl.trainer.utils``; other releases have no hash, and write nothing."""
    if hasattr(module, "hash_module"):
        wrap(module, "hash_module", _of_whole_weights)


def _of_whole_weights(wrapped: Callable[..., str], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Collective where weights are sharded, one buffer at a time: digests take the place of their values."""
    model: nn.Module = args[0] if args else kwargs["module"]
    buffers = [buffer for buffer in buffers_of(model.parameters()) if buffer.sharded]
    if not buffers:
        return wrapped(*args, **kwargs)
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    state = dict(model.state_dict())
    for buffer in buffers:
        with torch.no_grad(), unshard([buffer]):
            for owner in buffer.owners:
                state.update(dict.fromkeys(names.get(id(owner), ()), _digest(owner)))
    return wrapped(SimpleNamespace(state_dict=lambda: state))


def _digest(param: Tensor) -> Tensor:
    """``[32]`` bytes."""
    found = hashlib.sha256()
    for _, part in packed_parts(param):
        found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)
