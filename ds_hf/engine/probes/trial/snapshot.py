"""The state of an engine, kept in host memory while steps are replayed, and brought back bit for bit.

Each rank keeps what it owns: parameters, masters, moments, the loss scaler, module buffers, counters, random states and
the groups' settings. Gradients of an unfinished accumulation are kept too.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf import host
from ds_hf.engine.checkpoint.rng import random_states, restore_random_states
from ds_hf.engine.probes.trial.memory import resident_tensors

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Snapshot", "room_for_snapshot"]

HOST_SHARE = 0.5  # of the free host memory of this rank
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "_applied")


def room_for_snapshot(engine: CoreEngine) -> bool:
    """Whether the host can hold a copy of what this rank owns."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in resident_tensors(engine)}
    return bool(sum(storages.values()) <= HOST_SHARE * host.available_memory() / host.local_world_size())


class Snapshot:
    """Taken at construction; ``restore`` may be called once."""

    def __init__(self, engine: CoreEngine) -> None:
        self.engine = engine
        self.random = random_states()
        self.counters = {name: getattr(engine, name) for name in COUNTERS}
        self.micro_steps = engine.accumulation.micro_steps
        self.tensors = [_kept(tensor) for tensor in self._lasting()]
        optimizer = engine.optimizer
        self.states: dict[Any, dict[str, Any]] = {}
        self.scaler: dict[str, Any] = {}
        self.groups: list[dict[str, Any]] = []
        self.gradients: list[tuple[Any, Tensor | None, Tensor | None]] = []
        self.places: dict[Any, torch.device] = {}
        if optimizer is not None:
            self.states = {
                param: {key: _kept(value) for key, value in state.items()} for param, state in optimizer.state.items()
            }
            self.scaler = copy.deepcopy(optimizer.loss_scaler.state_dict())
            self.groups = [_settings(group) for group in optimizer.param_groups]
        for gradient in engine.reducer.buffers:
            gradient.collect(engine.reducer.factor)
            owned = gradient.settled()
            self.places[gradient] = gradient.buffer.device if owned is None else owned.device
            self.gradients.append((gradient, _kept(gradient.partial), _kept(owned)))

    def _lasting(self) -> list[Tensor]:
        engine = self.engine
        owned = [buffer.shard if buffer.sharded else buffer.full for unit in engine.units for buffer in unit.buffers]
        optimizer = engine.optimizer
        if optimizer is not None:
            optimizer.store.wait_for_states()
        masters = [] if optimizer is None else [*optimizer.masters.values(), *optimizer.low_bits.values()]
        return [*owned, *masters, *engine.module.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Everything as it was."""
        engine = self.engine
        for unit in engine.units:
            for buffer in unit.buffers:
                if buffer.region is not None:
                    buffer.region.writing()
        # Asked for again: parameters that are still on their way must land before they are overwritten.
        for tensor, kept in zip(self._lasting(), self.tensors, strict=True):
            tensor.copy_(kept)
        for unit in engine.units:
            for buffer in unit.buffers:
                if buffer.sharded:
                    buffer.refresh()
        for name, value in self.counters.items():
            setattr(engine, name, value)
        engine.accumulation.micro_steps = self.micro_steps
        optimizer = engine.optimizer
        if optimizer is not None:
            self._restore_states(optimizer.state)
            optimizer.loss_scaler.load_state_dict(self.scaler)
            for group, settings in zip(optimizer.param_groups, self.groups, strict=True):
                group.update(settings)
        for gradient, partial, owned in self.gradients:
            gradient.clear()
            gradient.partial = None if partial is None else partial.to(gradient.buffer.device)
            gradient.owned = None if owned is None else owned.to(self.places[gradient])
        restore_random_states(self.random)

    def _restore_states(self, states: Any) -> None:
        for param in [param for param in states if param not in self.states]:
            del states[param]
        for param, kept in self.states.items():
            now = states[param]
            for key in [key for key in now if key not in kept]:
                del now[key]
            for key, value in kept.items():
                if isinstance(value, Tensor) and isinstance(now.get(key), Tensor):
                    now[key].copy_(value)
                else:
                    now[key] = value


def _kept(value: Any) -> Any:
    """A copy in host memory."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
