"""Everything that training changes, kept in host memory on each rank, and put back bit for bit.

Kept: parameters and masters as far as the rank holds them, the optimizer's states and options, the loss scaler,
counters, buffers of the model, random states, the position in ``training_data``, train and eval modes, and if asked for
the gradients of an unfinished accumulation. Tensors are written back in place, so that what holds one (a captured
graph, pinned memory) holds the right one afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.checkpoint.digest import digest_of
from ds_hf.engine.checkpoint.live import extra_states, random_states, restore_random_states
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.optim.stepping import sync_weights
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.errors import DsHfError

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Snapshot"]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Snapshot:
    """The state of ``engine`` now. Taking one is local; ``restore`` is collective.

    Args:
        gradients: keep those of an unfinished accumulation too; otherwise there may be none.

    Raises:
        DsHfError: the engine has no optimizer, is inside an accumulation, or has its states in files.
    """

    def __init__(self, engine: CoreEngine, *, gradients: bool = False) -> None:
        if engine.optimizer is None:
            raise DsHfError("a test that brings everything back needs an engine with an optimizer")
        if engine.optimizer.store.splits:
            raise DsHfError(
                f"a test that brings everything back keeps a copy, but {engine.optimizer.store.splits}: run it with "
                '"device": "cpu" in offload_optimizer, or on a smaller model'
            )
        engine.settle_step()
        engine._finish_update()
        if not gradients and not all(gradient.empty for gradient in engine.reducer.buffers):
            raise DsHfError("a learning-rate test begins between optimizer steps, not inside an accumulation")
        self.engine = engine
        self.optimizer: ShardedOptimizer = engine.optimizer
        self.gradients = [self._gradient(gradient) for gradient in engine.reducer.buffers] if gradients else []
        self.tensors = {key: _host(value) for key, value in self._live_tensors()}
        self.states = [(param, _kept(state)) for param, state in self.optimizer.state.items()]
        self.rest = copy.deepcopy(self._live_rest())
        self.modes = [(module, module.training) for module in engine.module.modules()]
        self.outcome = engine.optimizer._outcome
        self.random = random_states()

    def _gradient(self, gradient: GradientBuffer) -> tuple[GradientBuffer, list[tuple[Tensor, torch.device] | None]]:
        """What one holds, and where: before its reduction, and after it."""
        gradient.collect(self.engine.reducer.factor)
        held = gradient.partial, gradient.settled()
        return gradient, [None if value is None else (_host(value), value.device) for value in held]

    # -- what there is ----------------------------------------------------------------------------------------------

    def _buffers(self) -> Iterator[FlatBuffer]:
        """Flat buffers that training changes."""
        return iter(self.optimizer.masters)

    def _live_tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """Masters, values that are not their masters, and buffers of modules; what is shared comes once."""
        for index, buffer in enumerate(self._buffers()):
            buffer.comm_stream.join()
            self.optimizer.store.visit(buffer)
            master, owned = self.optimizer.masters[buffer], buffer.owned(whole=self.optimizer.whole)
            yield ("master", index), master
            if owned.data_ptr() != master.data_ptr():
                yield ("values", index), owned
            if buffer in self.optimizer.low_bits:
                yield ("low", index), self.optimizer.low_bits[buffer]
        for name, value in self.engine.module.named_buffers():
            yield ("buffer", name), value

    def _live_rest(self) -> dict[str, Any]:
        engine, optimizer = self.engine, self.optimizer
        loader = engine.training_dataloader
        return {
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "scaler": optimizer.loss_scaler.state_dict(),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "applied": engine.last_step.applied,
            "accumulation": (engine.accumulation.micro_steps, engine.accumulation.forced),
            "extra": {name: child.get_extra_state() for name, child in extra_states(engine.module).items()},
            "data": loader.state_dict() if hasattr(loader, "state_dict") else None,
        }

    # -- putting it back --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self) -> None:
        """Make the engine what it was. Collective, at the end of an update or of a failed one."""
        engine, optimizer = self.engine, self.optimizer
        optimizer.forget_failure()
        engine.settle_step()
        engine._finish_update()
        engine.hooks.reset()
        optimizer.reducer.abandon()
        for key, live in self._live_tensors():
            live.copy_(self.tensors[key])
        for buffer in self._buffers():
            sync_weights([buffer], whole=optimizer.whole)
        self._restore_states()
        self._restore_rest()
        for gradient, held in self.gradients:
            gradient.clear()
            gradient.partial, gradient.owned = (None if kept is None else kept[0].to(kept[1]) for kept in held)
        for module, mode in self.modes:
            module.training = mode
        restore_random_states(self.random)

    def _restore_states(self) -> None:
        state = self.optimizer.state
        known = {id(param) for param, _ in self.states}
        for param in [param for param in state if id(param) not in known]:
            del state[param]
        for param, saved in self.states:
            _put_back(state[param], saved)

    def _restore_rest(self) -> None:
        engine, optimizer, rest = self.engine, self.optimizer, copy.deepcopy(self.rest)
        for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
            params = group.pop("params")
            _put_back(group, saved)
            group["params"] = params
        optimizer.loss_scaler.load_state_dict(rest["scaler"])
        for name, value in rest["counters"].items():
            setattr(engine, name, value)
        engine.last_step.applied = rest["applied"]
        engine.accumulation.micro_steps, engine.accumulation.forced = rest["accumulation"]
        optimizer._outcome = self.outcome
        for name, child in extra_states(engine.module).items():
            if name in rest["extra"]:
                child.set_extra_state(rest["extra"][name])
        loader = engine.training_dataloader
        if rest["data"] is not None and loader.state_dict() != rest["data"]:
            loader.load_state_dict(rest["data"])

    # -- the proof --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def differences(self) -> list[str]:
        """Names of what is not, to the bit, what it was. Local; copies one tensor at a time."""
        wrong = [
            f"{kind} {name}" for (kind, name), live in self._live_tensors() if not _same(live, self.tensors[kind, name])
        ]
        state = self.optimizer.state
        for index, (param, saved) in enumerate(self.states):
            live = state.get(param, {})
            wrong += [
                f"{key} of stretch {index}" for key in {**saved, **live} if not _same(live.get(key), saved.get(key))
            ]
        wrong += ["an optimizer state"] * (len(state) != len(self.states))
        rest = self._live_rest()
        wrong += [key for key in rest if digest_of(rest[key]) != digest_of(self.rest[key])]
        wrong += ["train and eval modes"] * any(module.training != mode for module, mode in self.modes)
        wrong += ["random states"] * (digest_of(random_states()) != digest_of(self.random))
        return wrong


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _host(v) if isinstance(v, Tensor) else copy.deepcopy(v) for key, v in state.items()}


def _put_back(live: dict[str, Any], saved: dict[str, Any]) -> None:
    """``live`` becomes equal to ``saved``, its tensors in place."""
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        present = live.get(key)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and present.shape == value.shape:
            present.copy_(value)
        else:
            live[key] = copy.deepcopy(value)


def _same(live: Any, saved: Any) -> bool:
    """Bits, so that a NaN equals itself and 0.0 is not -0.0."""
    if not isinstance(live, Tensor) or not isinstance(saved, Tensor):
        return type(live) is type(saved) and digest_of(live) == digest_of(saved)
    if live.dtype is not saved.dtype or live.shape != saved.shape:
        return False
    ours, theirs = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (live, saved))
    return torch.equal(ours, theirs)
