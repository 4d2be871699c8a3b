"""When gradients are reduced: as units complete in backward, in an order that is the same on every rank.

Invariants
- In a backward that reduces, every gradient buffer is reduced exactly once, or once more at the end for what a
  reentrant checkpoint added after that: ranks always issue the same collectives in the same order.
- The order never depends on what a rank computes: the reverse of the planned order in the first backward, then the
  reverse of the order in which rank 0's forward first used the units. A buffer that completes early waits for its
  predecessors; one that never completes (unused parameters) is flushed at the end of backward.
- Between gathers (sharded parameters) only an event that all ranks see may reduce: the end of the backward of a unit's
  last call, and not the completion of its gradients, for ranks may use different parameters of it (experts).
- What stages of a pipeline hold together is reduced in ``finish``, after all backwards: before that, another stage may
  wait for what this one has to send it. All stages do it in the order of the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ds_hf.engine.accumulation import Accumulation
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.grad_watch import GradientWatch
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = ["Reducer", "divided_loss"]

_MANY = 64  # accumulations without a first step: it is made by something else than the engine

# A backward may reach parameters of several engines, and its loss is of one of them.
_driven: list[float | None] = []  # the loss scale of the backward that an engine runs, None without one
_by_hand: WeakSet[Reducer] = WeakSet()  # whose loss scale the present backward has, which no engine runs


@contextmanager
def divided_loss(scale: float | None) -> Iterator[None]:
    """An engine runs backward inside, and has divided its loss by the accumulation steps and multiplied it by
    ``scale``, if it has one."""
    _driven.append(scale)
    try:
        yield
    finally:
        _driven.pop()


@dataclass(eq=False)
class _Backward:
    """How far the present backward is.

    Attributes:
        next: place in the order of the buffer that is reduced next.
        complete: buffers that may be reduced when it is their turn.
        reduced: those that were, by the end of a call.
        collected: those of which every gradient is in; any call of their unit reopens them.
    """

    next: int = 0
    complete: set[GradientBuffer] = field(default_factory=set)
    reduced: set[GradientBuffer] = field(default_factory=set)
    collected: set[GradientBuffer] = field(default_factory=set)


class Reducer:
    """Drives the gradient buffers of one engine through each backward.

    Args:
        units: all units, in planned order.
        buffers: gradient buffers of each unit's trainable buffers.
        every_micro_batch: the plan shards gradients, so each backward reduces.
        at_the_end: nothing is gained by reducing earlier than when backward ends: no memory, for whole gradients are
            kept, and no time, for nothing runs beside it; ranks then wait for each other once.
        world: the processes that reduce in one order, by default those that share the buffers. Where other collectives
            come between, as in a model that is parallel itself, other orders could wait for each other in a circle.
        accumulation: tells which backward is the last before a step, and by how many losses are divided; by default
            every one is.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buffers: dict[Unit, list[GradientBuffer]],
        every_micro_batch: bool,
        *,
        at_the_end: bool = False,
        world: Axis | None = None,
        accumulation: Accumulation | None = None,
    ) -> None:
        self.units = list(units)
        self.by_unit = buffers
        self.every_micro_batch = every_micro_batch
        self.at_the_end = at_the_end
        self.world = world
        self.accumulation = accumulation or Accumulation(1)
        self.suspended = False  # inside no_sync() or coalesce_grad_reduction()
        self.held = False  # backwards inside those left gradients that nothing has reduced yet
        self._finished = False  # a step was made
        self.backwards = 0  # how many ended since all gradients were cleared
        self.fills = False  # on one process, too, a buffer without any gradient has zeros, where others have some
        self.used: dict[Unit, None] = {}
        self._agreed: list[Unit] | None = None
        self.asked = False  # whether the model was called since the last step
        self.on_order: Callable[[list[Unit]], None] = lambda units: None  # told the order of use, once
        self._now = _Backward()
        self.shown = False  # gradients are in ``.grad``
        self._gave_way = False  # and are again when the backward of another engine is over
        self.optimizer: Callable[[], Any] = lambda: None  # a weak reference
        self._lent = False
        self.renew()

    @cached_property
    def watch(self) -> GradientWatch:
        """From the first backward on."""
        return GradientWatch()

    def renew(self) -> None:
        """Find out how each gradient buffer is reduced, again when there are further ones; between backwards."""
        self._by_call = {buffer for unit, bs in self.by_unit.items() if unit.sharded for buffer in bs}
        self._tied = sorted((b for b in self.buffers if b.buffer.replicas.tied), key=lambda b: b.buffer.replicas.tied)
        self._order = self._reversed(self._agreed or self.units)
        self._whole = [buffer for buffer in self.buffers if buffer.policy.whole]
        for buffer in self.buffers:
            buffer.lent = self._lent
            buffer.marks = False
        for buffer in [buffer for buffer in self.buffers if buffer.tells and buffer not in self._by_call][:1]:
            buffer.marks = True  # those of calls have something on all ranks or on none

    def lend(self) -> None:
        """From now on backward writes gradients to memory that the next one overwrites (CUDA graphs)."""
        self._lent = True
        self.renew()

    def ask(self, *, changed: bool) -> None:
        """A call of the model begins.

        Args:
            changed: other parameters are frozen than before.
        """
        for buffer in self.buffers if changed else ():
            frozen = {index for index, param in enumerate(buffer.buffer.params) if not param.requires_grad}
            buffer.ask(frozen, first=not self.asked)
        self.asked = True

    @property
    def buffers(self) -> list[GradientBuffer]:
        return [buffer for unit in self.units for buffer in self.by_unit.get(unit, ())]

    @property
    def _inside(self) -> list[GradientBuffer]:
        """Those that backwards reduce."""
        return [buffer for buffer in self.buffers if buffer not in self._tied] if self._tied else self.buffers

    @property
    def reduces(self) -> bool:
        """Whether the present backward reduces."""
        return not self.suspended and (self.every_micro_batch or self.accumulation.at_boundary)

    @contextmanager
    def suspending(self, who: str) -> Iterator[None]:
        """Backwards inside reduce nothing.

        Raises:
            DsHfError: one such block is inside another.
        """
        if self.suspended:
            raise DsHfError(
                f"{who} nested inside no_sync() or coalesce_grad_reduction(): nothing is reduced in there already"
            )
        self.suspended = True
        try:
            yield
        finally:
            self.suspended = False

    def reduce_held(self) -> None:
        """Reduce each buffer once, in an order that is the same on every rank. Collective."""
        self.take_back()
        for buffer in self._inside:
            buffer.collect(self.factor)
            if not buffer.sleeps:
                buffer.reduce()
        self.held = False
        self.show()

    @property
    def factor(self) -> float:
        """What gradients of the present backward are multiplied by."""
        own, steps = self.loss_scale, 1 if _driven else self.accumulation.steps
        running = (_driven[-1] or 1.0) if _driven else self._scale_by_hand(own)
        return own / running / steps

    def _scale_by_hand(self, own: float) -> float:
        scales = {own} if self.scaled else {other.loss_scale for other in _by_hand}
        if len(scales) > 1:
            raise DsHfError(
                "two engines have scaled a loss, and a backward reached parameters of a third: with which loss scale "
                "cannot be told. Call engine.backward(loss), or the .backward() of each engine.scale(loss) at once"
            )
        return scales.pop() if scales else own

    @property
    def loss_scale(self) -> float:
        """What the optimizer divides gradients by."""
        optimizer = self.optimizer()
        return 1.0 if optimizer is None else float(optimizer.loss_scaler.scale)

    @property
    def has_scale(self) -> bool:
        """Losses of this engine are multiplied by one."""
        optimizer = self.optimizer()
        return optimizer is not None and bool(optimizer.loss_scaler.use_grad_scaling)

    @property
    def scaled(self) -> bool:
        """The present backward is of a loss that was multiplied by the loss scale, and the engine does not run it."""
        return self in _by_hand

    @scaled.setter
    def scaled(self, value: bool) -> None:
        if value:
            _by_hand.add(self)
        else:
            _by_hand.discard(self)

    def await_backward(self, loss: Tensor) -> None:
        """``loss``, ``[]`` of any dtype, carries the loss scale; that counts when its backward begins, if it does, and
        until it is over, whatever it reached."""
        at_the_end = torch.autograd.Variable._execution_engine.queue_callback

        def end() -> None:
            self.scaled = False

        def begin(_: Tensor) -> None:
            self.scaled = True
            at_the_end(lambda: at_the_end(end))  # after what ends the backwards of engines, which reads it

        loss.register_hook(begin)  # type: ignore[no-untyped-call]

    @property
    def running_scaled(self) -> bool:
        """The loss of the present backward was multiplied by a loss scale, of this engine or of another: ``factor``
        makes this one's of it."""
        return _driven[-1] is not None if _driven else any(other.has_scale for other in _by_hand)

    @property
    def driven_elsewhere(self) -> bool:
        """An engine runs the present backward; asked by one that does not."""
        return bool(_driven)

    @property
    def accumulates(self) -> bool:
        """There are gradients of some micro-batches of a step that takes several."""
        return self.backwards > 0 and self.accumulation.keeps_sums

    @staticmethod
    def forget_scaled() -> None:
        """Between backwards: one that ended in an exception may have left whose loss scale it had."""
        _by_hand.clear()

    @property
    def has_new(self) -> bool:
        """The present backward gave trained parameters gradients."""
        return bool(self._now.collected) or any(buffer.ready for buffer in self.buffers)

    def record_use(self, unit: Unit) -> None:
        """Forward reached ``unit``."""
        self.used.setdefault(unit)

    def on_complete(self, buffer: GradientBuffer) -> None:
        """Every parameter of the buffer has its gradient in ``.grad``."""
        tied = buffer in self._tied
        buffer.collect(self.factor, soon=self.reduces and not tied)
        self._now.collected.add(buffer)
        if self.reduces and not tied and buffer not in self._by_call:
            self._now.complete.add(buffer)
            if not self.at_the_end:
                self._advance()

    def end_call(self, unit: Unit, *, partly: bool = False) -> None:
        """Backward of a call of ``unit`` is over, on all ranks at the same place.

        Args:
            partly: only of one of its blocks, and others come.
        """
        unit.awaited -= 1
        if partly:
            return
        for buffer in self.by_unit.get(unit, ()):
            if buffer in self._by_call:
                buffer.collect(self.factor, soon=self.reduces)
                if unit.leaf:
                    self._now.collected.add(buffer)  # as far as this rank goes
                if self.reduces and unit.awaited <= 0 and not buffer.sleeps:
                    buffer.reduce()
                    self._now.reduced.add(buffer)

    def reopen(self, unit: Unit) -> None:
        """Backward reached another call of ``unit``: more gradients will come."""
        self._now.collected.difference_update(self.by_unit.get(unit, ()))

    def is_complete(self, unit: Unit) -> bool:
        """All gradients of ``unit`` that the calls seen so far can give are in."""
        collected = self._now.collected
        return all(buffer in collected or buffer.silent for buffer in self.by_unit.get(unit, ()))

    def _advance(self) -> None:
        now, order = self._now, self._order
        while now.next < len(order) and (order[now.next] in now.complete or order[now.next].silent):
            if self._order[now.next] not in now.reduced and not self._order[now.next].sleeps:
                self._order[now.next].reduce()
            now.next += 1

    def _reversed(self, units: Sequence[Unit]) -> list[GradientBuffer]:
        tied = set(self._tied)
        ordered = [b for unit in reversed(units) for b in self.by_unit.get(unit, ()) if b not in tied]
        return sorted(ordered, key=lambda buffer: buffer in self._by_call)

    def _agree(self) -> None:
        """Fix the order for the rest of the run. Ranks may have used different units, or in another order."""
        used = [*self.used, *(unit for unit in self.units if unit not in self.used)]
        first = self._order[0].buffer
        places = [len(self.used), *(self.units.index(unit) for unit in used)]
        indices = torch.tensor(places, device=first.device)
        collectives.broadcast(indices, self.world or first.axis, what="the order of the units")
        count, *places = indices.tolist()
        self._agreed = ordered = [self.units[place] for place in places]
        self._order = self._reversed(ordered)
        self.on_order(ordered[:count])

    def flush(self) -> None:
        """End of backward: reduce what has not been reduced, release what is still gathered."""
        self.backwards += self.has_new
        if self.backwards == _MANY * self.accumulation.steps and not self._finished:
            warn_once(
                f"{self.backwards} backwards, and no step yet: gradients add up. engine.step() makes it, at the "
                "boundary of an accumulation; step() of the optimizer given to initialize() finds no gradients"
            )
        for buffer in self.buffers:
            buffer.collect(self.factor, soon=self.reduces and not buffer.buffer.replicas.tied)
        self.held = self.suspended or (self.held and not self.reduces)
        if self.reduces:
            self._now.complete.update(self._inside)
            self._advance()
            for buffer in self._inside:  # what arrived after the buffer's turn
                if buffer.has_partial:
                    buffer.reduce()
            for comm_stream in {buffer.comm_stream for buffer in self.buffers}:
                comm_stream.arrive()
            if self._order and self._agreed is None:
                self._agree()
        self._end_backward()
        self.show()
        self.watch.pause -= 1
        if self.watch.pause < 0 and self.accumulation.at_boundary:
            self.watch.begin(buffer.buffer.params for buffer in self.buffers if not buffer.shown)

    def show(self) -> None:
        """Let users see the gradients in ``.grad``, where every rank has the whole of them."""
        for buffer in self._whole:
            buffer.show()
        self.shown, self._gave_way = bool(self._whole), False

    def take_back(self) -> None:
        """Before backward, or the step: autograd adds to ``.grad``. What users changed there counts."""
        self.shown = False
        for buffer in self._whole:
            if buffer.shown and buffer.ready:
                buffer.collect(self.factor)  # a backward that nothing announced
            buffer.take_back()

    def give_way(self) -> None:
        """Before a backward of another engine, which may reach parameters of this one."""
        if self.shown:
            self._gave_way = True
            self.take_back()

    def receive(self) -> None:
        """At the end of it, while its factor is known: what it gave, also to a part of a buffer only."""
        for buffer in self.buffers:
            if buffer.ready:
                buffer.collect(self.factor)
        if self._gave_way:
            self.show()

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.awaited = 0
            unit.release()
        self._now = _Backward()
        self.used.clear()

    def abandon(self) -> None:
        """Backward ended in an exception: the gradients of the unfinished step cannot be told apart and are dropped."""
        self.clear()
        self._end_backward()

    def finish(self) -> None:
        """Before the optimizer: reduce what backwards before the boundary, or raw ``.backward()`` calls, left, and
        what users wrote into ``param.grad``. Where processes train together, a buffer without any gradient has zeros,
        those that one process alone holds (experts) as all others, as on one that ``fills``; where no process has any,
        there is none.
        What cannot tell so (optimizers that send something else, copies between GPUs) takes zeros then, too.

        Raises:
            DsHfError: they wrote it where it was sharded by then.
        """
        self.shown, self._finished = False, True
        buffers = [*self._inside, *self._tied]
        together, untouched = not all(buffer.alone for buffer in buffers), all(buffer.untouched for buffer in buffers)
        nothing, fills = together and untouched, together or (self.fills and not untouched)
        for buffer in buffers:
            if buffer.shown and not buffer.ready:
                buffer.take_back()
            else:
                buffer.collect(self.factor)
                buffer.pick_up()
                buffer.collect()
            if buffer.has_partial or (not buffer.has_reduced and fills and not buffer.sleeps):
                buffer.reduce(last=True, nothing=nothing)
        tell = [buffer for buffer in buffers if buffer.tells] if nothing else []
        if nothing and not tell:
            warn_once(
                "engine.step() without any backward on this process, where none learns whether others had one (an "
                "optimizer that sends momenta in one bit, or sums by copies between GPUs): gradients count as zeros, "
                "weights decay and momentum goes on. Without a backward anywhere, call no engine.step()",
                everywhere=True,
            )
        elif nothing and all(buffer.came_from_nobody for buffer in tell):
            self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        self.held, self.backwards, self.asked = False, 0, False
        self.shown = self._gave_way = False
        if self.watch.watched:
            self.watch.end()
        for buffer in self.buffers:
            buffer.clear()

    def free(self) -> None:
        """Drop all gradients, and the memory through which they came."""
        self.clear()
        for buffer in self.buffers:
            buffer.free()
