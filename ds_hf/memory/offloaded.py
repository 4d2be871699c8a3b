"""Activations in host memory while a timeline is recorded: the engine's own offload, over host memory without bytes.

So what stays on the device for how long, and how much the host is asked for, is what the engine does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ds_hf.engine.modules.activations.arena import Arena
from ds_hf.engine.modules.activations.attach import BlockOffload, longest_list
from ds_hf.engine.modules.activations.offload import ActivationOffload
from ds_hf.memory.tracker import LiveTensors

__all__ = ["offload_of"]

_META = torch.device("meta")


def offload_of(model: nn.Module, tracker: LiveTensors) -> BlockOffload | None:
    """An offload around the checkpointed blocks of ``model``, which lies on the meta device; ``None`` without any."""
    if not any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        return None
    offload = ActivationOffload(_META, pinned=False, alike=longest_list(model))
    offload.arena = _CountedArena(tracker)
    return BlockOffload(model, offload)


class _CountedArena(Arena):
    """Host memory that is counted and not there."""

    def __init__(self, tracker: LiveTensors) -> None:
        super().__init__(pinned=False)
        self._tracker = tracker

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        with _disable_current_modes():  # it is none of the device's tensors
            memory = torch.empty(nbytes, dtype=torch.uint8, device=_META)
        self._tracker.ignore(memory)
        return memory
