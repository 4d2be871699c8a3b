"""The most bytes that live tensors took while a real engine trained on the CPU, looked at after every operator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hf import initialize
from ds_hf.engine.modules.adapters import AdaptedLayer
from tests.helpers.compiled import with_quick_backend

__all__ = ["LiveStorages", "count_adapters", "count_states", "train"]

_SMALL = 512


class LiveStorages(TorchDispatchMode):
    """Sums the storages that operators made and that live, as large as they are now: gathers resize them.

    Args:
        device: the kind of device whose storages count.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code may run; otherwise torch runs blocks eagerly as long as the mode is entered."""
        return True

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self.add(leaf)
        self.look()
        return result

    def look(self) -> None:
        """Take the sum now."""
        alive = [reference() for reference in list(self._storages.values())]
        total = sum(-(-storage.nbytes() // _SMALL) * _SMALL for storage in alive if storage is not None)
        self.peak = max(self.peak, total)


def train(model: nn.Module, config: dict[str, Any], batch: dict[str, Tensor]) -> int:
    """Peak bytes of a step after the first: of two, for a thread of gloo may hold what it was given for a while."""
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    if engine.compiler.compiled:
        with_quick_backend(engine)
    count_adapters(engine.module)
    _step(engine, config, batch)
    peaks = []
    for _ in range(2):
        tracker = LiveStorages()
        count_states(tracker, engine)
        with tracker:
            _step(engine, config, batch)
        peaks.append(tracker.peak)
    engine.destroy()
    return min(peaks)


def count_adapters(model: nn.Module) -> None:
    """Have adapters computed as without the mode that counts, for which they make way otherwise."""
    for module in model.modules():
        adapted = getattr(module.__dict__.get("forward"), "call", None)
        if isinstance(adapted, AdaptedLayer):
            adapted.counts = True


def _step(engine: Any, config: dict[str, Any], batch: dict[str, Tensor]) -> None:
    for _ in range(config.get("gradient_accumulation_steps", 1)):
        loss = engine(**batch).loss
        engine.backward(loss)
        del loss
        engine.step()


def count_states(tracker: LiveStorages, engine: Any) -> None:
    """Count what the engine keeps all the time."""
    for unit in engine.units:
        for buffer in unit.buffers:
            tracker.add(buffer.full)
            tracker.add(buffer.shard)
    for master in engine.optimizer.masters.values():
        tracker.add(master)
    for state in engine.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                tracker.add(value)
    for buffer in engine.module.buffers():
        tracker.add(buffer)
