"""The only place whose hooks on modules and autograd gather, release and reduce units; they are around user code.

Per unit: before forward gather; after forward release, unless backward will follow at once (the root) or this *is*
backward (recomputation under activation checkpointing); before backward - a hook on the outputs - gather again;
reduce when the gradients are complete; release when also the gradients of the inputs of all its calls have been
computed, at the latest when backward ends. Complete gradients alone do not say that autograd is done with the weights:
frozen ones have none, and ``weight.detach()`` is needed for inputs only.

A unit whose weight the model's forward reads itself (``external``) is a *guest* of the model's call: gathered from the
read until that call is over, and in backward until it comes to what ran before the read.

A backward that makes a graph (``create_graph=True``: gradient penalties, forces inside forward) has nothing to reduce,
and what it computed needs the weights again in no order that hooks could follow: units that it reaches stay gathered
until the step, or the call of the model that follows an ordinary backward.

Hooks sit on the modules, not on the engine, so ``model.generate()`` works at every stage.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ds_hf.engine.events import Events
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.external import ExternalParameters, check_graph, external_parameters, notice_anew, unwatch, watch
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.loading import refuse_load
from ds_hf.engine.zero.reduction import Reducer, divided_loss
from ds_hf.engine.zero.sharing import Sharing, Succession, is_trained, link
from ds_hf.engine.zero.unit import Prefetch, Unit, UnitCall, beside_levels, in_backward, on_gradient, tensors_in
from ds_hf.errors import DsHfError
from ds_hf.log import log_once, warn_once

__all__ = ["Hook", "UnitHooks"]

# Of the engines that share modules, those whose model is being called or whose backward runs. Such modules have the
# hooks of each of them, which act in calls and backwards of their own engine, or of none.
_running: dict[UnitHooks, None] = {}
_live: WeakSet[UnitHooks] = WeakSet()  # of all engines that train

_UNSCALED = (
    "Loss scaling is required with fp16: call engine.backward(loss) or engine.scale(loss).backward(), not "
    "loss.backward()"
)
_OF_ANOTHER = (
    "backward(loss) of an engine that has no loss scale reached parameters of this one, which trains in fp16. Where "
    "both learn from that loss, let this one run the backward. Where this one does not, as a GAN's discriminator in "
    "the generator's step, freeze its model: requires_grad_(False) before the forward, and requires_grad_(True) after "
    "the backward"
)


class _Untracked:
    """Whether calls of modules are followed; which units were gathered while they were not."""

    def __init__(self) -> None:
        self.depth = 0
        self.gathered: dict[Unit, None] = {}


_untracked = _Untracked()


@contextmanager
def untracked_calls() -> Iterator[None]:
    """Calls of modules inside are parts of something that is followed: a unit that is not there is gathered for the
    first of them, and released when the block ends.

    For a function that runs in pieces (tiles), each with a backward of its own inside.
    """
    _untracked.depth += 1
    try:
        yield
    finally:
        _untracked.depth -= 1
        while not _untracked.depth and _untracked.gathered:
            unit, _ = _untracked.gathered.popitem()
            unit.release()


class Removable(Protocol):
    """What can be taken away again, as torch's ``RemovableHandle``."""

    def remove(self) -> None: ...


class UnitHooks:
    """Installs and removes the hooks of one engine.

    Args:
        units: all units; the one named ``""`` is the root.
        reducer: told of uses and gradients; its ``flush`` runs at the end of each backward.
        prefetch: told of the units that forward and backward reach.
        needs_scale: gradients carry a loss scale.
        sharing: what is to be done about engines that have some of the parameters too.
        shards: the parameters are shards between uses.
        events: told of the ends of backwards, and of those that are not the engine's.
    """

    def __init__(
        self,
        units: list[Unit],
        reducer: Reducer,
        prefetch: Prefetch | None = None,
        *,
        needs_scale: bool = False,
        sharing: Sharing | None = None,
        shards: bool = False,
        events: Events | None = None,
    ) -> None:
        self.units = units
        self.events = events or Events()
        self._own_backward = ExitStack()  # what is around a backward that is not the engine's
        self.reducer = reducer
        self.prefetch = prefetch or Prefetch(enabled=False)
        reducer.on_order = self.prefetch.follow
        self.handles: list[Removable] = []  # of ours, and of what others put on the model for as long as these stay
        self._scopes: list[Removable] = []
        self._external_modules: dict[nn.Module, Hook] = {}
        self._calls: dict[Unit, UnitCall] = {}
        self._first: dict[Unit, UnitCall] = {}  # of the first of joined blocks, in the present forward
        self._begun: set[UnitCall] = set()  # calls that the present backward has reached
        self._open = False  # the model is called
        self._modes: set[bool] = set()  # of training, or not, in which it was
        self._guests: list[Unit] = []  # of the open call
        self._last: UnitCall | None = None  # the last call of a unit that ended in it
        self._watched: list[Unit] = []
        self._between: Unit | None = None  # gathered for its next block, which is called as a rule
        self._kept: list[FlatBuffer] = []  # buffers of the root that keep_root() holds
        self._flush_queued = False
        self._unscaled = False  # the present backward is of a loss without the scale that fp16 needs
        self._in_graphs: list[FlatBuffer] = []  # buffers that graphs of gradients use
        self._graphs_are_over = False  # an ordinary backward has come since
        self._makes_graph = False  # the present backward is none
        self._graphs_to_check = 4 if shards else 0  # calls of the model in which early uses are looked for
        self.driven = False  # Engine.backward runs: it flushes by itself
        self.steps = 0  # that the optimizer has begun
        self.applied = self._applied_before = 0  # the last of them that was not skipped, as far as is known
        self.needs_scale = needs_scale
        self.unit_of = {id(param): unit for unit in units for param in unit.params}
        self.sharing = sharing or Sharing()
        self.shards = shards
        self.shares = bool(self.sharing.others)  # some of its modules have hooks of other engines
        self.succession: Succession | None = None  # another engine trains its parameters since
        self._successor: UnitHooks | None = None
        self._held: list[FlatBuffer] = []  # see ``link``
        self.on_call: Callable[[], None] = _do_nothing  # called where a call of the model that will train begins
        self.on_stray: Callable[[Tensor], None] = _do_nothing  # told of parameters that no optimizer has
        self._hooked: set[int] = set()  # parameters whose gradients are looked at
        self.grown = False  # something was put into one of the modules that ``watch_modules`` had
        self._modules: set[int] = set()

    def install(self, model: nn.Module) -> None:
        """Register everything. Call once."""
        for former, succession in self.sharing.ended.items():
            former.end(succession, self)
        model.__dict__["ds_external_parameters"] = ExternalParameters(model)
        for module in model.modules():
            attach = self._external_modules[module] = Hook(self._attach_external)
            module.__dict__.setdefault("_ds_attach_external", []).append(attach)
        if self.shares:
            self.relink()
        else:
            self._scope_units()
        self.watch_gradients()
        if self.reducer.buffers:
            self.watch_modules(model)
            for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
                handle: RemovableHandle = register(_GrowthHook(self))
                self.handles.append(handle)
                weakref.finalize(self, handle.remove)  # torch keeps it for all modules of the process
        for other in self.sharing.others:
            other.relink()
        self.sharing = Sharing()  # the others are not ours to keep
        if self.reducer.buffers:
            _live.add(self)

    def watch_modules(self, model: nn.Module) -> None:
        """Note in ``grown`` what is put into ``model`` or its modules from now on."""
        self.grown, self._modules = False, {id(module) for module in model.modules()}

    @property
    def uses(self) -> set[int]:
        """Ids of the parameters of the model."""
        return {*self.unit_of, *map(id, self.units[0].whole)}

    @property
    def trains(self) -> set[int]:
        """Ids of those that the engine updates."""
        return {id(p) for buffers in self.reducer.by_unit.values() for b in buffers for p in b.buffer.params}

    def end(self, succession: Succession, by: UnitHooks) -> None:
        """Another engine, ``by``, trains the parameters from now on."""
        self.remove()
        self.succession, self._successor = succession, by

    @property
    def may_be_called(self) -> bool:
        """The weights are there when the model is called: by these hooks, or those of the engine that came after."""
        if self.succession is None:
            return True
        return (
            self.succession.wholly
            and self._successor is not None
            and bool(self._successor.handles or self._successor._scopes)
        )

    def relink(self) -> None:
        """Other engines have some of the parameters too, or took some over: use them where they lie. Collective."""
        self.shares = True
        self._leave_units()
        held = link(self.units, shards=self.shards)
        for buffer in held:
            if buffer not in self._held:
                buffer.gather_exactly()
                buffer.hold.count += 1
        self._let_go([buffer for buffer in self._held if buffer not in held])
        self._held = held
        for buffer in self.used_buffers:
            buffer.users[self] = None
        self._scope_units()

    @property
    def used_buffers(self) -> list[FlatBuffer]:
        """The buffers in which parameters of the model lie."""
        return list(dict.fromkeys([*self._held, *(buffer for unit in self.units for buffer in unit.buffers)]))

    def holds(self, buffer: FlatBuffer) -> bool:
        """Whether it stays gathered because several engines use it."""
        return buffer in self._held

    def _let_go(self, held: Sequence[FlatBuffer]) -> None:
        for buffer in held:
            buffer.hold.count -= 1
            if not buffer.hold.count:
                buffer.release(spare_users=True)

    def _scope_units(self) -> None:
        for unit in self.units:
            for module in unit.modules:
                self._scope(module, unit)
        for module in self._external_modules:
            for param in external_parameters(module):
                self._attach_external(module, param)
        self._watched += [unit for unit in self.units if watch(unit, self._on_read)]

    def _leave_units(self) -> None:
        for handle in self._scopes:
            handle.remove()
        self._scopes.clear()
        for unit in self._watched:
            unwatch(unit)
        self._watched.clear()
        self.watch_gradients()

    def watch_gradients(self) -> None:
        """Look at the gradients of all parameters that have some: torch takes no such hook for what is frozen. Again
        when there are further buffers, or other parameters train."""
        for buffer in self.used_buffers:
            buffer.users[self] = None
        for unit, gradients in self.reducer.by_unit.items():
            for gradient in gradients:
                for index, param in enumerate(gradient.buffer.params):
                    self._watch_gradient(param, _GradientHook(self, unit, gradient, index))
        for unit in self.units:  # what is left no optimizer of this engine has
            for params, sharded in ((unit.params, unit.sharded), (unit.whole, False)):
                for param in params:
                    self._watch_gradient(param, _StrayHook(self, sharded=sharded))

    def _watch_gradient(self, param: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        if param.requires_grad and id(param) not in self._hooked:
            self._hooked.add(id(param))
            self.handles.append(_on_accumulated(param, hook))

    def forget(self, ids: Iterable[int]) -> None:
        """Parameters with these ids, which no optimizer had, have one from their next buffer on."""
        self._hooked.difference_update(ids)

    def remove(self) -> None:
        """Take all hooks away."""
        self.reducer.take_back()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._let_root_go()
        self.let_graphs_go()
        self._leave_units()
        for module, attach in self._external_modules.items():
            attached = module.__dict__.get("_ds_attach_external", [])
            if attach in attached:
                attached.remove(attach)
            if not attached:
                module.__dict__.pop("_ds_attach_external", None)
                module.__dict__.pop("ds_external_parameters", None)
        self._external_modules.clear()
        for buffer in self.used_buffers:
            buffer.users.pop(self, None)
            buffer.leave()
        self._let_go(self._held)
        self._held = []
        _running.pop(self, None)
        _live.discard(self)

    def keep_root(self) -> None:
        """Gather the root until the model is called next. Collective.

        After adapters were gathered to be saved: of prompt encoders PEFT saves what they compute, on one rank alone.
        """
        for buffer in self.units[0].buffers if not self._kept else ():
            if buffer.sharded:
                buffer.gather_exactly()
                buffer.hold.count += 1
                self._kept.append(buffer)

    def _let_root_go(self) -> None:
        while self._kept:
            self._kept.pop().hold.count -= 1

    def _hold_for_graph(self, unit: Unit) -> None:
        unit.gather()
        self._makes_graph, self._graphs_are_over = True, False
        for buffer in unit.buffers:
            if buffer.sharded and buffer not in self._in_graphs:
                buffer.hold.count += 1
                self._in_graphs.append(buffer)

    def let_graphs_go(self) -> None:
        """No backward comes any more through the gradients that were made as part of a graph."""
        held, self._in_graphs = self._in_graphs, []
        self._let_go(held)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """A whole backward by the engine; what an exception leaves of it is dropped."""
        self.reducer.take_back()
        self.driven = True
        self._note()
        try:
            with divided_loss(self.reducer.loss_scale if self.needs_scale else None), _reaching_others(self):
                yield
                self.flush()
        except BaseException:
            self.abandon()
            raise
        finally:
            self.driven = False
            self._note()

    def _note(self) -> None:
        """Whether the engine's model is being called, or its backward runs, may have changed."""
        if self.shares and (self._open or self.driven or self._flush_queued):
            _running[self] = None
        elif _running:
            _running.pop(self, None)

    def _is_others(self, module: nn.Module) -> bool:
        """``module`` is called by another engine, whose hooks do what is to be done."""
        return bool(self.shares and _running and self not in _running and module is not self.units[0].module)

    def _release(self, unit: Unit) -> None:
        """Give memory back, but not that of which another engine is in the middle."""
        if not (self.shares and len(_running) > 1):
            unit.release()
            return
        for buffer in unit.buffers:
            if len(buffer.users) == 1:
                buffer.release()

    def reset(self) -> None:
        """Forget calls, and a backward, that ended in an exception."""
        if self._flush_queued:
            self.abandon()
        if not in_backward():
            self.reducer.forget_scaled()
        for unit in self.units:
            unit.depth = 0
        self._open, self._last = False, None
        self._note()
        self._guests.clear()
        self._between = None
        self.prefetch.drop()
        self._calls.clear()
        self._first.clear()

    def abandon(self) -> None:
        """Backward ended in an exception."""
        for unit in self.units:
            unit.open_calls.clear()
        self._begun.clear()
        self._first.clear()
        self._flush_queued = False
        self._own_backward.close()
        self._note()
        if self.reducer.backwards:
            warn_once(
                "a backward ended in an exception: the gradients that came before it in this step are dropped with its "
                "own, which are added to them already, and a step of the micro-batches that follow is divided by as "
                "many as ever. A script that leaves a batch out and goes on loses the others of that step (said once)"
            )
        self.reducer.abandon()

    def _scope(self, module: nn.Module, unit: Unit) -> None:
        if unit.name and not unit.sharded:  # there is nothing to release, and nothing to gather in backward
            reached = Hook(partial(self._pre_replicated, unit))
            self._scopes.append(module.register_forward_pre_hook(reached, prepend=True))
            return
        pre = Hook(partial(self._pre_forward, unit))
        post = Hook(partial(self._post_forward, unit))
        self._scopes.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True))
        self._scopes.append(module.register_forward_hook(post, with_kwargs=True, always_call=True))
        load: Any = Hook(partial(refuse_load, unit))
        self._scopes.append(module.register_load_state_dict_pre_hook(load))  # type: ignore[no-untyped-call]

    def _attach_external(self, module: nn.Module, param: nn.Parameter) -> None:
        unit = self.unit_of.get(id(param))
        if unit is not None and unit.sharded:
            self._scope(module, unit)
            if self._open:  # registered inside the call that uses it, as PEFT does in that of AdaLoRA's model
                self._on_read(unit, param)

    # -- forward ------------------------------------------------------------------------------------------------

    def _pre_replicated(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self._is_others(module):
            return
        unit.gather()
        if torch.is_grad_enabled() and not in_backward():
            if not self.units[0].depth:  # called by itself: nothing announces its backward
                if self.reducer.shown:
                    self.reducer.take_back()
                if not self.reducer.asked:
                    self.on_call()
            self.reducer.record_use(unit)

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_others(module):
            return None
        if _untracked.depth:
            if unit.start_gather():
                _untracked.gathered.setdefault(unit)
            unit.gather()
            return None
        return self._enter(unit, module, args, kwargs)

    def _enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not unit.name and module is unit.module:
            self._open = True
            self._note()
            if self.shards and module.training not in self._modes:
                self._modes.add(module.training)
                notice_anew(self.units)
            self._let_root_go()
            if self._graphs_are_over and not in_backward():
                self.let_graphs_go()
        recomputing = in_backward()
        begins = not (recomputing or self.units[0].depth) and torch.is_grad_enabled()
        if begins and (not unit.name or not self.reducer.asked):  # once a step for who calls the model's parts
            self._graphs_to_check -= bool(self._graphs_to_check)
            self.on_call()
        unit.gather()
        if self._graphs_to_check and unit.sharded and not recomputing and torch.is_grad_enabled():
            for buffer in unit.buffers:
                if buffer.sharded and (param := buffer.params[0]).requires_grad:
                    check_graph(param)
        if not recomputing:
            unit.depth += 1
            if unit.depth > 1:
                return None
            if unit.name and self._between is not None:
                self._pass(unit)
            if unit.name or module is unit.module:  # a module of the root may be called alone, and on one rank
                self.prefetch.forward(unit)
            if torch.is_grad_enabled():
                self.reducer.record_use(unit)
        if not (unit.sharded and torch.is_grad_enabled()):
            return None
        call = self._calls[unit] = UnitCall(unit, self._over, partly=bool(unit.joined) and module is not unit.module)
        if not unit.name:
            return None
        if call.partly and not recomputing and unit in self._first:
            call.within = self._first[unit]
            return None
        watched = call.watch_inputs(args, kwargs)
        if unit.joined and not call.partly and call.inputs and not recomputing:
            self._first[unit] = call
        return watched

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not _untracked.depth and not self._is_others(module):
            self._leave(unit, module, output)

    def _leave(self, unit: Unit, module: nn.Module, output: Any) -> None:
        recomputing = in_backward()
        if not recomputing:
            unit.depth = max(unit.depth - 1, 0)
            if unit.depth:
                return
        if not unit.name and module is unit.module:
            self._close(output)
        if torch.is_grad_enabled() and (unit.sharded or unit.name == ""):
            call = self._calls.pop(unit, None)
            if call is not None and not recomputing and beside_levels():
                self._hold_for_graph(unit)
            watched = [
                t for t in tensors_in(output) if t.requires_grad and not (call is not None and call.has_input(t))
            ]
            for tensor in watched:
                on_gradient(tensor, partial(self._pre_backward, unit, call, self.steps))
            if watched and call is not None and call.inputs and not recomputing:
                unit.awaited += 1
            if watched and call is not None and self._open and not recomputing:
                self._last = call
            if watched and ((unit.name == "" and module is unit.module) or unit is self.prefetch.last):
                return  # backward starts with the root and the last unit: keep them
        if recomputing:
            return
        if unit.joined and module is not unit.joined[-1]:
            self._between = unit
            return
        self._between = None if self._between is unit else self._between
        self._release(unit)
        if unit.name == "":
            if self._between is not None:
                self._pass(unit)
            self.prefetch.drop()

    def _pass(self, unit: Unit) -> None:
        """Forward is at ``unit``: one whose last block it left out is not needed any more."""
        if self._between is not None and self._between is not unit:
            if not self._between.depth:
                self._between.release()
            self._between = None

    def _on_read(self, unit: Unit, param: Tensor | None) -> None:
        """A parameter of ``unit`` is read outside its calls: gather it if the model is called, or its backward runs.

        Collective; ranks that run the same code read the same. Elsewhere the parameter stays as it is.
        """
        if self.unit_of.get(id(param)) is not unit:
            return
        if in_backward():
            if self._open or self.driven or self._flush_queued:
                unit.gather()
                self._queue_flush()
        elif self._open:
            used = unit in self.reducer.used
            self._enter(unit, unit.module, (), {})
            call = self._calls.setdefault(unit, UnitCall(unit, self._over))  # there is none yet under no_grad
            if self._last is not None and not used:
                call.ends_before(self._last)
            self._guests.append(unit)

    def on_use(self, param: Tensor) -> None:
        """A function of torch gets ``param`` at rest: something inside a block is called, and not the block."""
        unit = self.unit_of.get(id(param))
        if unit is not None and (self._open or in_backward()) and watch(unit, self._on_read, blocks=True):
            self._watched.append(unit)
            self._on_read(unit, param)
            log_once(f"{unit.name} is used and not called: at stage 3 it is gathered until the model's call is over")

    def _close(self, output: Any) -> None:
        """The model's call is over, and with it the calls of its guests."""
        self._open, self._last = False, None
        guests, self._guests = self._guests, []
        for guest in guests:
            self._leave(guest, guest.module, output)
        self._note()

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The optimizer is about to change the weights."""
        self.steps += 1
        self._applied_before, self.applied = self.applied, self.steps

    def skip_step(self) -> None:
        """It has not."""
        self.applied = self._applied_before

    def _pre_backward(self, unit: Unit, call: UnitCall | None, steps: int, grad: Tensor) -> None:
        if steps < self.applied and not unit.name:
            warn_once(
                "backward of a loss that was computed before the last step: the weights have changed since, and its "
                "gradients are of neither the old ones nor the new ones. Plain torch makes this an error. Compute the "
                "loss after the step, or run the backward of all losses before it"
            )
        if self.reducer.shown:
            self.reducer.take_back()
        if call is not None and torch.is_grad_enabled():  # with create_graph=True
            self._hold_for_graph(unit)
        elif call is not None:
            if call not in self._begun:
                self._begun.add(call)
                self.reducer.reopen(unit)
                call.begin(len(self.reducer.by_unit.get(unit, ())))
                for other in call.later:
                    if other in self._begun:
                        other.reached_input(0, grad)
            unit.gather()
            self.prefetch.backward(unit)
        self._queue_flush()

    def _queue_flush(self) -> None:
        """Have backward end with a flush also when user code calls ``loss.backward()`` itself."""
        if not self.driven and not self._flush_queued:
            if self.events.watched:
                self._own_backward.enter_context(self.events.phase("own backward"))
            self._flush_queued = True
            self._unscaled = self.needs_scale and not self.reducer.running_scaled  # of others' too, while it is known
            self._note()
            for other in _others(self):
                other.reducer.give_way()
            torch.autograd.Variable._execution_engine.queue_callback(self._flush_callback)

    def _flush_callback(self) -> None:
        with self._own_backward:
            self._end_own_backward()

    def _end_own_backward(self) -> None:
        self._flush_queued = False
        for other in _others(self):
            other.reducer.receive()
        if self._makes_graph and not self.driven and not self.reducer.has_new:
            self._makes_graph = False
            self._note()
            return  # it was a part of the forward
        if not self.driven:
            if self._unscaled and self.reducer.has_new:
                self.abandon()
                raise DsHfError(_OF_ANOTHER if self.reducer.driven_elsewhere else _UNSCALED)
            self.reducer.scaled = False
            self.flush()
        self._note()

    def flush(self) -> None:
        """End of backward."""
        if self.events.watched:
            with self.events.phase("flush"):
                self._flush()
        else:
            self._flush()

    def _flush(self) -> None:
        for unit in self.units:
            unit.open_calls.clear()
        self._begun.clear()
        self._first.clear()
        self._makes_graph, self._graphs_are_over = False, True
        self.reducer.flush()
        self.prefetch.drop()

    def _over(self, call: UnitCall) -> None:
        self.reducer.end_call(call.unit, partly=call.partly)
        if not call.partly:
            self.release_if_over(call.unit)

    def _on_complete(self, unit: Unit, buffer: GradientBuffer) -> None:
        self.reducer.on_complete(buffer)
        self.release_if_over(unit)

    def release_if_over(self, unit: Unit) -> None:
        """Release a unit whose backward needs its weights no more; of the root only the end of backward can tell."""
        if unit.name and unit.sharded and not unit.open_calls and self.reducer.is_complete(unit):
            self._release(unit)


@contextmanager
def _reaching_others(hooks: UnitHooks) -> Iterator[None]:
    for other in _others(hooks):
        other.reducer.give_way()
    try:
        yield
    finally:
        for other in _others(hooks):
            other.reducer.receive()


def _others(hooks: UnitHooks) -> list[UnitHooks]:
    """Other engines, but for those that are in a backward of their own."""
    if len(_live) < 2:
        return []
    return [each for each in _live if each is not hooks and not (each.driven or each._flush_queued)]


class Hook:
    """A live engine's function on a module. A copy of the module (deepcopy, pickle) has one that does nothing."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return Hook, (_do_nothing,)


class _GrowthHook:
    """Tells a live engine that a module or parameter was put into a module, of whatever model."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: UnitHooks) -> None:
        self.hooks = weakref.ref(hooks)

    def __call__(self, module: nn.Module, name: str, value: Any) -> None:
        hooks = self.hooks()
        if hooks is not None and id(module) in hooks._modules:
            hooks.grown = True


class _GradientHook:
    """Tells a live engine of a parameter's gradient. torch keeps such hooks where the garbage collector does not see
    them: strong references to what holds the parameter would keep a forgotten engine for ever."""

    __slots__ = ("buffer", "count", "hooks", "idle", "index", "ready", "unit")

    def __init__(self, hooks: UnitHooks, unit: Unit, buffer: GradientBuffer, index: int) -> None:
        self.hooks, self.unit, self.buffer = weakref.ref(hooks), weakref.ref(unit), weakref.ref(buffer)
        self.index, self.ready, self.count, self.idle = index, buffer.ready, len(buffer.buffer.params), buffer.idle

    def __call__(self, param: Tensor) -> None:
        if param.grad is None or not param.__dict__.get("ds_grad_is_ready", True):
            return  # a function that runs in tiles says, as DeepSpeed's do, that more comes to it
        self.ready.add(self.index)
        if len(self.ready) < self.count - len(self.idle):  # most calls end here: there is one for each parameter
            return
        hooks, unit, buffer = self.hooks(), self.unit(), self.buffer()
        if hooks is not None and unit is not None and buffer is not None:
            hooks._on_complete(unit, buffer)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _StrayHook:
    """As ``_GradientHook``, for a parameter that no optimizer has."""

    __slots__ = ("drops", "hooks")

    def __init__(self, hooks: UnitHooks, *, sharded: bool) -> None:
        self.hooks, self.drops = weakref.ref(hooks), sharded

    def __call__(self, param: Tensor) -> None:
        if is_trained(param):  # by another engine
            return
        if self.drops:
            param.grad = None
        if (hooks := self.hooks()) is not None:
            hooks.on_stray(param)


class _EngineLast(OrderedDict[int, Callable[[Tensor], None]]):
    """The functions on a parameter's gradient. A script's are called before the engine's, also those that it adds after
    ``initialize``: the engine's takes the gradient of a unit's last parameter away."""

    def __setitem__(self, key: int, hook: Callable[[Tensor], None]) -> None:
        super().__setitem__(key, hook)
        if not isinstance(hook, _GradientHook | _StrayHook):
            for own in [each for each, other in self.items() if isinstance(other, _GradientHook | _StrayHook)]:
                super().__setitem__(own, self.pop(own))  # torch reads the dict's order, which move_to_end leaves alone


def _call_each(hooks: dict[int, Callable[[Tensor], None]], param: Tensor) -> None:
    for hook in tuple(hooks.values()):
        hook(param)


def _on_accumulated(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook`` when the gradient of ``param`` is in its ``.grad``."""
    there: Any = param._post_accumulate_grad_hooks
    if not isinstance(there, _EngineLast):
        ordered = param._post_accumulate_grad_hooks = _EngineLast()
        if there:  # a script's handles still remove from the dict that they know
            ordered[-1] = partial(_call_each, there)
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
