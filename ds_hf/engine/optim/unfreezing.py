"""Parameters that are frozen when the engine is built and train later, or train and are frozen for a while.

``requires_grad`` says which train, at the start of each call of the model. What the optimizer lists and is frozen lies
with the frozen parameters, without states, until it is unfrozen: then it moves to a trainable buffer of its own, whose
states begin there. What is frozen again stays where it is, and its segments are passed over
(``ShardedOptimizer.step``). All ranks run the same script, so they find the same at the same place.

What a script puts into another parameter group goes there at the next call of the model, or step (``regrouping``).
Modules that it puts into the model have parameters that no engine knows: those are told, and so is what it writes to
parameters where the step takes that back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from ds_hf.engine.optim.regrouping import regroup
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.zero.at_rest import tell_lost_write
from ds_hf.engine.zero.buffer import FlatBuffer, home_of, logical_shape
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.sharing import is_trained
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import DsHfError
from ds_hf.log import log_once, warn_once

__all__ = ["Unfreezing"]


# Makes flat buffers of a unit for parameters, those with what trains them that have a group, by ``id``.
AddBuffers = Callable[[Unit, Sequence[nn.Parameter], Mapping[int, int]], None]


class Unfreezing:
    """Follows which parameters of one engine train.

    Args:
        model: all of its parameters are looked at.
        waiting: of each parameter that the optimizer lists and that was frozen the parameter group, by ``id``.
        add: makes buffers.
        optimizer: ``None`` for an engine that only infers: nothing is followed.
        names: of the parameters, by ``id``.
        fixed: why none may be frozen or unfrozen, ``""`` where they may.
    """

    def __init__(
        self,
        model: nn.Module,
        waiting: Mapping[int, int],
        add: AddBuffers,
        units: Sequence[Unit],
        reducer: Reducer,
        hooks: UnitHooks,
        optimizer: ShardedOptimizer | None,
        names: Mapping[int, str],
        fixed: str = "",
    ) -> None:
        self._waiting, self._add, self._names, self._fixed = dict(waiting), add, names, fixed
        self._units, self._reducer, self._hooks, self._optimizer = units, reducer, hooks, optimizer
        self._params = list(model.parameters()) if optimizer is not None else []
        self._flags: list[bool] | None = [param.requires_grad for param in self._params]
        self._left: list[tuple[Unit, FlatBuffer]] = []  # buffers that a graph may still want to be gathered
        self._told: list[bool] | None = []  # when what no group has was told
        self._strays: dict[Tensor, None] = {}  # that have gradients and belong to no group
        self._new: dict[str, nn.Parameter] = {}  # that were put into the model since, and that nothing was said of yet
        self._told_new: set[int] = set()  # ids of those of which it was
        self.compare_settings: Callable[[], int] = lambda: 0  # with other processes'; says after how many steps again
        self._steps_until = 1
        if optimizer is not None:
            hooks.on_call, hooks.on_stray, optimizer.before_step = self.look, self._note_stray, self._before_step
            optimizer.on_edit, self._writes = self.regroup, _LostWrites(optimizer)

    def look(self) -> None:
        """The model is about to be called: see what trains. Collective where something has been unfrozen.

        Raises:
            DsHfError: it cannot be trained.
        """
        if not self._reducer.asked:
            self.tidy()
        if self._optimizer is not None:
            self._follow_edits(self._optimizer)
        if self._hooks.grown or self._new:
            self._tell_of_new()
        flags = [param.requires_grad for param in self._params]
        changed = flags != self._flags
        if changed:
            self._refuse(flags)
            self.give_places([param for param in self._params if param.requires_grad])
            self._hooks.watch_gradients()
            self._tell_compilers(flags)
            self._flags = flags
        self._reducer.ask(changed=changed)

    def _tell_compilers(self, flags: list[bool]) -> None:
        """torch 2.11's compiled code looks at a parameter again only where its module's dictionary has changed."""
        before = self._flags or [not flag for flag in flags]
        changed = {id(p) for p, old, new in zip(self._params, before, flags, strict=True) if old != new}
        for module in self._units[0].module.modules():
            for name, param in module._parameters.items():
                if id(param) in changed:
                    module._parameters[name] = None
                    module._parameters[name] = param

    def _before_step(self) -> None:
        """See what scripts have done since the model was called, or since the last step where it was not."""
        assert self._optimizer is not None
        if self._reducer.asked:
            self._follow_edits(self._optimizer)
        else:
            self.look()
        self._writes.tell()
        self._hooks.begin_step()
        self._steps_until -= 1
        if not self._steps_until:
            self._steps_until = self.compare_settings()
        if not (steps := self._hooks.steps) & (steps - 1) or not steps % 64:
            self._hooks.grown = True  # or may be: what is put into ``module._modules`` tells no hook

    def _follow_edits(self, optimizer: ShardedOptimizer) -> None:
        """Groups hold what they held, or a script has edited them."""
        groups, listed = optimizer.optimizer.param_groups, optimizer.listed
        if len(groups) != len(listed) or not all(
            group["params"] is given and len(given) == len(kept) and all(map(is_, given, kept))
            for group, (_, given, kept) in zip(groups, listed, strict=True)
        ):
            self.regroup()

    def regroup(self) -> None:
        """A script has edited the parameter groups.

        Raises:
            DsHfError: what it did cannot be followed.
        """
        assert self._optimizer is not None
        if self._fixed:
            raise DsHfError(f"parameter groups were edited after initialize(): {self._fixed}")
        self._waiting = regroup(self._optimizer, self._waiting, self._params, self._name)
        self._hooks.forget(self._waiting)
        self._flags = None

    def tidy(self) -> None:
        """A step is over, and with it every graph: drop what was kept for one."""
        for param in self._strays:
            param.grad = None
        self._strays.clear()
        for unit, buffer in self._left:
            if buffer in unit.buffers:
                unit.buffers.remove(buffer)
            buffer.close()
        self._left.clear()

    def free(self) -> None:
        """Nothing trains any more: with what makes buffers goes the memory that they share, which GPUs read of each
        other."""
        self._add = lambda unit, params, groups: None

    def give_places_to(self, names: Iterable[str]) -> bool:
        """Let the parameters with these names that wait have states although they are frozen, for a checkpoint has
        some; whether there are any. Collective."""
        wanted = set(names)
        chosen = [p for p in self._params if id(p) in self._waiting and self._names.get(id(p)) in wanted]
        if not chosen or self._fixed:
            return False
        log_once(
            f"{len(chosen)} parameters that are frozen now ({self._name(chosen[0])}, ...) have optimizer states in the "
            "checkpoint: they are kept, for when these are unfrozen. Leave them out of the optimizer's groups to do "
            "without"
        )
        self.give_places(chosen)
        return True

    def give_places(self, params: Iterable[nn.Parameter]) -> None:
        """Let those of ``params`` that wait have states. Collective."""
        optimizer, chosen = self._optimizer, {id(param) for param in params if id(param) in self._waiting}
        moves: dict[tuple[Unit, FlatBuffer], list[nn.Parameter]] = {}
        for unit in self._units:
            for param in (*unit.params, *unit.whole):
                if id(param) in chosen and (home := home_of(param)) is not None:
                    self._check_place(param, home.buffer)
                    moves.setdefault((unit, home.buffer), []).append(param)
        if not moves or optimizer is None:
            return
        others = dict.fromkeys(user for _, buffer in moves for user in buffer.users if user is not self._hooks)
        for (unit, buffer), found in moves.items():
            self._move(unit, buffer, found)
        optimizer.take_in()
        self._reducer.renew()
        self._flags = None  # what has a place may be frozen still
        for buffer in {home.buffer for found in moves.values() for p in found if (home := home_of(p)) is not None}:
            buffer.count_users()
        for user in (self._hooks, *others) if others else ():
            user.relink()

    def _check_place(self, param: Tensor, buffer: FlatBuffer) -> None:
        if not buffer.frozen:
            raise DsHfError(
                f"{self._name(param)} was unfrozen, and the optimizer of another engine trains it by now: let only one "
                "engine list it"
            )
        kept = sum(user.holds(buffer) for user in buffer.users)
        if buffer.hold.count > kept:
            raise DsHfError(
                f"{self._name(param)} was unfrozen, and the model called, inside a GatheredParameters (or another "
                "context that keeps it gathered): leave that before the model is called"
            )

    def _move(self, unit: Unit, buffer: FlatBuffer, chosen: Sequence[nn.Parameter]) -> None:
        """Out of a frozen buffer; the rest of it gets a smaller one, so that nothing is held twice."""
        groups = {id(param): self._waiting.pop(id(param)) for param in chosen}
        self._add(unit, chosen, groups)
        if buffer not in unit.buffers:  # of another engine, too
            return
        if rest := [param for param in buffer.params if (home := home_of(param)) is not None and home.buffer is buffer]:
            self._add(unit, rest, {})
        if buffer.sharded and self._reducer.used:  # a forward came before, whose backward may read this memory
            self._left.append((unit, buffer))
        else:
            unit.buffers.remove(buffer)
            buffer.close()

    def _refuse(self, flags: Sequence[bool]) -> None:
        before = self._flags or [False] * len(flags)
        for param, was, trains in zip(self._params, before, flags, strict=True):
            if was == trains:
                continue
            name = self._name(param)
            if trains and is_packed(param):
                raise DsHfError(
                    f"{name} was unfrozen, but it is quantized, and quantized weights do not train: freeze it "
                    "(requires_grad_(False)) and train adapters on it, or load the model without quantization"
                )
            if self._fixed:
                raise DsHfError(f"{name} was {'unfrozen' if trains else 'frozen'} after initialize(): {self._fixed}")

    def _note_stray(self, param: Tensor) -> None:
        """No group of the optimizer has the parameter, and it has a gradient."""
        self._strays.setdefault(param)
        if self._told is self._flags:
            return
        self._told = self._flags
        trained = {id(p) for buffer in self._reducer.buffers for p in buffer.buffer.params}
        others = sum(p.requires_grad and id(p) not in trained for p in self._params) - 1
        more = f" (nor {others} more that require gradients)" if others > 0 else ""
        warn_once(
            f"{self._name(param)} has a gradient, but no parameter group of the optimizer lists it{more}: it does not "
            "train, and its gradient is dropped. List it when the engine is built (model_parameters="
            "model.parameters(), or the groups of optimizer=): what is frozen then may be unfrozen later. Or freeze it "
            "(requires_grad_(False)), which saves computing the gradient"
        )

    def _tell_of_new(self) -> None:
        """Say which parameters that train were put into the model after the engine was built."""
        if self._hooks.grown:
            model, known = self._units[0].module, {*map(id, self._params), *self._told_new}
            self._hooks.watch_modules(model)
            self._new = {n: p for n, p in model.named_parameters() if id(p) not in known and not is_trained(p)}
        told = [name for name, param in self._new.items() if param.requires_grad]
        if not told:
            return
        self._told_new.update(id(self._new.pop(name)) for name in told)
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        warn_once(
            f"{', '.join(told[:3])}{more}: put into the model after initialize(), so this engine does not know them. "
            "They do not train, their gradients are not averaged over processes, and its checkpoints lack them. "
            "Change the model before initialize(), or end the engine (engine.destroy()) and call initialize() again "
            "with the parameters that it has now. To train them beside it, give them an optimizer of their own and "
            "average their gradients; what is not to train, freeze (requires_grad_(False))"
        )

    def _name(self, param: Tensor) -> str:
        return self._names.get(id(param), f"a parameter of shape {tuple(logical_shape(param))}")


class _LostWrites:
    """Tells of what is written to parameters whose masters lie beside them, for the update takes it back."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer, self._steps = optimizer, 3  # in which values are compared

    def tell(self) -> None:
        """Before an update: say what was written since the last one. Seen is what torch counts as written; in the first
        steps, where what a loop does in every step (``p.data.clamp_()``) is seen, values are compared."""
        optimizer = self._optimizer
        # Where updates are delayed, values are older than their masters, as they should be.
        compared = self._steps > 0 and not (optimizer.store.splits or optimizer.store.delays)
        self._steps -= compared
        for buffer, master in optimizer.masters.items():
            if not buffer.sharded and set(map(type, buffer.params)) != {nn.Parameter}:
                continue  # they are on their way, of another class: they were not touched since
            if not buffer.sharded and (buffer in optimizer.low_bits or _share_memory(buffer.params[0], master)):
                continue
            now = [param._version for param in buffer.params]
            before = optimizer.versions.get(buffer, now)
            written = None
            if now != before:
                written = next(p for p, new, old in zip(buffer.params, now, before, strict=True) if new != old)
            if written is None and compared and not buffer.sharded:
                written = self._unlike_its_master(buffer)
            optimizer.versions[buffer] = now
            if written is not None:
                why = (
                    "that is lost: at ZeRO stage 3 its values are not here between uses"
                    if buffer.sharded
                    else "the step takes that back: its values in "
                    f"{buffer.dtype} follow the optimizer's in {master.dtype}"
                )
                tell_lost_write(written, why, everywhere=now == before)  # which only its master's process sees

    def _unlike_its_master(self, buffer: FlatBuffer) -> nn.Parameter | None:
        """The first parameter here that is not what its master rounds to."""
        optimizer = self._optimizer
        optimizer.store.visit(buffer, write=False)
        owned = buffer.owned(whole=optimizer.policy.whole, write=False)
        master = optimizer.masters[buffer]
        position = 0 if optimizer.policy.whole else buffer.layout.shard_range(buffer.axis.rank)[0]
        # In parts: gradients are still there, and what is made here adds to the peak.
        length = max(owned.numel() // 16, 1 << 12)
        for part, exact in zip(torch.split(owned, length), torch.split(master, length), strict=True):
            rounded = exact.to(dtype=part.dtype, device=part.device)
            unlike = (rounded != part) & ~(rounded.isnan() & part.isnan())
            if unlike.any():
                position += int(unlike.nonzero()[0])
                return next((buffer.params[slot.index] for slot in buffer.layout.slots if position < slot.end), None)
            position += part.numel()
        return None


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
