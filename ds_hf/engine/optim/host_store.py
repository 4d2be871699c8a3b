"""Optimizer states in host memory: updated there unit after unit, while finished parameters go up.

Each unit has a ``HostPlace``. On the HOST the worker updates it with the CPU's kernel and the 16-bit result is copied
up while the next one is updated. STREAMED units take another way at the same time: their states go up, the GPU updates
them, they go down again; the CPU and the link work on different units. The first of them go up for the next step when
the CPU is done. Units on the DEVICE are updated where they are. A step returns while updates go on: the next forward
waits for each unit when it gets there, so that most of it is computed beside them (``zero/pending.py`` holds up every
other use of a parameter). Where ranks gather what they updated, that is so for streamed units; those of the CPU are
waited for, as all ranks must gather in one order. Which unit has which place follows from the sizes and the settings,
so that it is the same on every rank and in every run; with ``stream: auto`` also from what the machine can do
(``stream_share.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.link import Arrival, HostLink
from ds_hf.engine.offload.memory import host_copy, host_empty
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.ops.split_master import LOW
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.optim.store import HostSettings, MakeJob, update_target
from ds_hf.engine.optim.stream_share import AutoShare, HostUnit, Room, streaming
from ds_hf.engine.optim.streamed_updates import InFlightUpdate, Outputs, StreamedUpdates
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.storage import DeviceGradientStorage, GradientStorage, HostGradientStorage

__all__ = ["DelayedStore", "HostPlace", "HostStore"]


class HostPlace(Enum):
    DEVICE = "device"
    HOST = "host"
    STREAMED = "streamed"


class HostStore:
    """States in host memory.

    Args:
        device: where the model computes.
        room: moves units to the device while there is memory; ``None`` leaves all where the settings put them.
        gradient_places: see ``HostGradientStorage``.
        auto: finds the share that is streamed; ``None`` takes that of the settings.
    """

    splits: str | None = None
    takes_split_masters = False  # the CPU updates whole masters
    delays = False  # updates go on while the parameters are in use
    defers = True  # updates may go on until the parameters are used
    skips = True

    def __init__(
        self,
        device: torch.device,
        settings: HostSettings,
        room: Room | None = None,
        gradient_places: int = 1,
        auto: AutoShare | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.link, self.worker = HostLink(device), Worker()
        self.places: dict[FlatBuffer, HostPlace] = {}
        self._compute, self._settings, self._room, self._auto = device, settings, room, auto
        self._gradient_places = gradient_places
        self._blocks: dict[FlatBuffer, Block] = {}
        self._inner: Optimizer | None = None
        self._segments: Mapping[GradientBuffer, Sequence[Segment]] = {}
        self._pending: dict[GradientBuffer, _PendingUpdate] = {}
        self._streamed = StreamedUpdates(device, pinned=settings.pinned)
        self._on_device = 0  # elements
        self._fixed: set[FlatBuffer] = set()  # updated on the host in any case
        self._next: list[Block] = []  # streamed in this order by the next step, as long as none of them went up
        self.outputs = Outputs(self.link, pinned=settings.pinned, at_once=not self.delays)

    # -- building -------------------------------------------------------------------------------------------------

    def place(self, buffer: FlatBuffer, owned: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        before = self.places.get(buffer)  # its masters were split: they come to where the moments are
        place = self._choose(values.numel()) if buffer.stays and before is None else HostPlace.HOST
        if before is HostPlace.DEVICE:
            place = before
        device = self._compute if place is HostPlace.DEVICE else self.device
        if owned.dtype == dtype and owned.device == device and buffer.stays and not self.delays:
            self._fixed.add(buffer)
            master = owned
        elif place is HostPlace.DEVICE:
            master = values.to(device=device, dtype=dtype, copy=True)
        else:
            master = host_copy(values, dtype, pinned=self._settings.pinned)
        if not buffer.stays:
            self._fixed.add(buffer)
        self.places[buffer] = place
        self._on_device += values.numel() if place is HostPlace.DEVICE and before is None else 0
        self._set_block(buffer, master)
        if before is not None and (gradient := self._gradient_of(buffer)) is not None:
            gradient.storage = self.gradient_storage(buffer)
        return master

    def place_low_bits(self, buffer: FlatBuffer) -> Tensor:
        numel = self._blocks[buffer].values.numel()
        if self.places[buffer] is HostPlace.DEVICE:
            low = torch.empty(numel, dtype=LOW, device=self._compute)
        else:
            low = host_empty(numel, LOW, pinned=self._settings.pinned)
        self._set_block(buffer, low)
        return low

    def _set_block(self, buffer: FlatBuffer, values: Tensor) -> None:
        self._blocks[buffer] = block = Block(values, buffer.labels.name)
        gradient = self._gradient_of(buffer)
        if gradient is not None and self._inner is not None:
            block.bind(self._segments[gradient], self._inner.state)

    def _gradient_of(self, buffer: FlatBuffer) -> GradientBuffer | None:
        return next((gradient for gradient in self._segments if gradient.buffer is buffer), None)

    def _choose(self, numel: int) -> HostPlace:
        """First units to the device: their gradients come last. Which of the others are streamed is chosen later."""
        settings = self._settings
        fits = self._on_device + numel <= settings.device_share * settings.numel * (1 + 1e-9)
        return HostPlace.DEVICE if fits else HostPlace.HOST

    def gradient_storage(self, buffer: FlatBuffer) -> GradientStorage:
        if self.places[buffer] is HostPlace.DEVICE:
            return DeviceGradientStorage(self._settings.accumulation_dtype)
        return self._settings.new_gradient_storage(self.link, self.worker, self._gradient_places)

    def bind(self, inner: Optimizer, segments: Mapping[GradientBuffer, Sequence[Segment]]) -> Sequence[FlatBuffer]:
        placed, self._inner, self._segments = self._inner is not None, inner, segments
        for gradient, cut in segments.items():
            self._blocks[gradient.buffer].bind(cut, inner.state)
        if placed:
            return ()
        offloaded = [g for g in segments if self.places[g.buffer] is not HostPlace.DEVICE]
        units = [self._unit(gradient) for gradient in offloaded]
        share, room = self._settings.streamed_share, self._settings.room
        if self._auto is not None:
            share, room = self._auto.decide(units, self.link)
        found = streaming(units, share, room)
        self._streamed.open(found.in_flight)
        for gradient, goes, stays in zip(offloaded, found.up, found.stays, strict=True):
            self.places[gradient.buffer] = HostPlace.STREAMED if goes else HostPlace.HOST
            if stays and not self.delays:
                gradient.storage = DeviceGradientStorage(self._settings.accumulation_dtype)
        buffers = [gradient.buffer for gradient in segments]
        return [b for b in buffers if self.places[b] is not HostPlace.HOST and self._may_split(b)]

    def _unit(self, gradient: GradientBuffer) -> HostUnit:
        settings, values = self._settings, self._blocks[gradient.buffer].values
        master = LOW.itemsize if self._may_split(gradient.buffer) else values.dtype.itemsize
        states = master + settings.moments_nbytes
        summed = settings.accumulation_dtype if settings.accumulates else gradient.dtype
        numel = values.numel()
        return HostUnit(numel, numel * states, numel * summed.itemsize, gradient.buffer not in self._fixed)

    def _may_split(self, buffer: FlatBuffer) -> bool:
        """Whether the master, if the GPU updates it, need not be more than its parameter lacks."""
        widths = buffer.dtype, self._blocks[buffer].values.dtype
        may = self._settings.split and not self.delays and buffer not in self._fixed
        return may and widths == (torch.bfloat16, torch.float32)

    # -- the step -------------------------------------------------------------------------------------------------

    def stream(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> Iterator[Sequence[GradientBuffer]]:
        yield from self.settle()  # what was not used since the last step
        at = {place: [g for g in gradients if self.places[g.buffer] is place] for place in HostPlace}
        unused = self.link.now()
        later = self.defers and (self._room is None or self._room.decided)
        # What the GPU updates is queued while it computes, what the CPU updates waits for the end of backward here.
        in_flight = {
            g: self._streamed.start(self._blocks[g.buffer], make([g]), self._target(g)) for g in at[HostPlace.STREAMED]
        }
        self._update_here(at[HostPlace.DEVICE], make)
        updates = list(self._submitted(at[HostPlace.HOST], make))
        yield at[HostPlace.DEVICE]
        if later:
            updates = [update for update in updates if not self._defer(*update, unused)]
        joined = [
            g for g, update in in_flight.items() if not (later and _is_alone(g) and g.buffer.defer_gather(update))
        ]
        yield from self._in_order(dict(updates), {gradient: in_flight[gradient] for gradient in joined}, gradients)
        if self._room is not None:
            self._fill_room(gradients)
        if later:
            self._next = [self._blocks[g.buffer] for g in gradients if self.places[g.buffer] is HostPlace.STREAMED]
            self._go_ahead()

    def _in_order(
        self,
        updates: Mapping[GradientBuffer, Future[None]],
        in_flight: Mapping[GradientBuffer, InFlightUpdate | None],
        gradients: Sequence[GradientBuffer],
    ) -> Iterator[Sequence[GradientBuffer]]:
        """Units as they are needed by the next forward: gathers of streamed ones come after their updates, and only
        the CPU's updates are waited for here."""
        for gradient in gradients:
            if gradient in updates:
                yield from self._finished([(gradient, updates[gradient])])
            elif gradient in in_flight:
                update = in_flight[gradient]
                if update is not None and (gradient.buffer.sharded or gradient.policy.whole):
                    update.wait()  # nothing is gathered now
                elif update is not None:
                    update.precede(gradient.buffer.comm_stream, gradient.comm_stream)
                yield [gradient]

    def _defer(self, gradient: GradientBuffer, update: Future[None], unused: Arrival) -> bool:
        """Have the next use of the unit's parameters, the forward as a rule, wait for their update.

        Not where processes gather them: who uses them first need not be the same on each.
        """
        if not _is_alone(gradient):
            return False
        gradient.buffer.check_views()
        pending = _PendingUpdate(self, gradient, update, unused)
        if not gradient.buffer.defer_gather(pending):
            return False
        self._pending[gradient] = pending
        return True

    def finish_pending(self, gradient: GradientBuffer, update: Future[None], unused: Arrival) -> None:
        """Wait for the update of a unit, and have its parameters brought where they are used."""
        del self._pending[gradient]
        update.result()
        self.outputs.finish(gradient, unused)
        self._go_ahead()

    def _go_ahead(self) -> None:
        """Bring up what the next step begins with, once the CPU has updated all that it has to: both want the same
        memory, and the forward waits for the CPU."""
        if not self._pending:
            self._streamed.ahead(self._next)
            self._next = []

    def _update_here(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> None:
        """Units on the device, all at once: a launch costs as much as the update of a million elements."""
        owned = [self._target(gradient) for gradient in gradients]
        outs = [update_target(o, self._blocks[g.buffer].values) for o, g in zip(owned, gradients, strict=True)]
        make(gradients)(outs)
        for target, out in zip(owned, outs, strict=True):
            if out is not None and out is not target:
                target.copy_(out)

    def _target(self, gradient: GradientBuffer) -> Tensor:
        return gradient.buffer.owned(whole=gradient.policy.whole)

    def _submitted(
        self, gradients: Sequence[GradientBuffer], make: MakeJob
    ) -> Iterator[tuple[GradientBuffer, Future[None]]]:
        """Updates on the CPU, but for those that would leave unwritten what is copied to the parameters."""
        for gradient in gradients:
            job = make([gradient])
            if not job.idle:
                out = self.outputs.begin(gradient, self._blocks[gradient.buffer].values)
                yield gradient, self.worker.submit(job, [out])

    def _finished(self, updates: Sequence[tuple[GradientBuffer, Future[None]]]) -> Iterator[Sequence[GradientBuffer]]:
        for gradient, update in updates:
            update.result()
            self.outputs.finish(gradient)
            yield [gradient]

    def visit(self, buffer: FlatBuffer, *, write: bool = True) -> None:
        if not buffer.sharded:
            buffer.gather()
        self._streamed.arrived(self._blocks[buffer], write=write)

    def wait_for_states(self) -> None:
        for block in self._blocks.values():
            self._streamed.arrived(block)

    def kept_apart(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def settle(self, *, last: bool = False) -> Iterator[Sequence[GradientBuffer]]:
        for gradient in list(self._pending):
            gradient.buffer.gather()
            yield [gradient]

    # -- states that move to the device for good ------------------------------------------------------------------

    def _fill_room(self, gradients: Sequence[GradientBuffer]) -> None:
        assert self._room is not None
        left = self._room.nbytes_for_states()
        for gradient in gradients if left is not None else ():
            block = self._blocks[gradient.buffer]
            summed = self._settings.accumulation_dtype.itemsize if self._settings.accumulates else 0
            needed = block.nbytes + block.values.numel() * (gradient.dtype.itemsize + summed)
            fixed = self.places[gradient.buffer] is HostPlace.DEVICE or not gradient.buffer.stays
            if left is None or fixed or needed > left:
                continue
            self._streamed.arrived(block)
            self._move(gradient, block)
            left -= needed
        if left is not None and HostPlace.STREAMED not in self.places.values():
            self._streamed.close()  # nothing is streamed any more

    def _move(self, gradient: GradientBuffer, block: Block) -> None:
        """The block's states to the device; the host memory goes back with the last tensor that lay there."""
        block.adopt(torch.empty(block.nbytes, dtype=torch.uint8, device=self._compute))
        self.places[gradient.buffer] = HostPlace.DEVICE
        gradient.storage = DeviceGradientStorage(self._settings.accumulation_dtype)
        self.outputs.drop(gradient)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # of an update: it was said, or the parameters are not wanted
            for _ in self.settle():
                pass
        self.worker.close()
        self._streamed.close()
        self.link.close()
        self._blocks.clear()
        self.outputs.close()


@dataclass(eq=False)
class _PendingUpdate:
    """The update of a unit that is waited for when its parameters are used; what ``FlatBuffer.defer_gather`` takes."""

    store: HostStore
    gradient: GradientBuffer
    update: Future[None]
    unused: Arrival
    over: bool = False

    def wait(self) -> None:
        if not self.over:
            self.over = True  # a fault is raised once: after it nothing is saved, and a checkpoint may be loaded
            self.store.finish_pending(self.gradient, self.update, self.unused)


def _is_alone(gradient: GradientBuffer) -> bool:
    """The unit's parameters are all here, and no other process has a part in them."""
    return not gradient.buffer.sharded and gradient.buffer.axis.world_size == 1


class DelayedStore(HostStore):
    """States in host memory, updated there while the next step computes: its weights are one step old.

    An update is finished, and its weights are synced, when the next one begins, or in ``settle``.
    """

    delays = True
    skips = False

    def __init__(self, device: torch.device, settings: HostSettings, room: Room | None = None) -> None:
        super().__init__(device, settings, room, gradient_places=2)
        self._running: list[tuple[GradientBuffer, Future[None]]] = []

    def stream(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> Iterator[Sequence[GradientBuffer]]:
        yield from self.settle()
        on_host = [g for g in gradients if self.places[g.buffer] is not HostPlace.DEVICE]
        here = [g for g in gradients if self.places[g.buffer] is HostPlace.DEVICE]
        self._update_here(here, make)
        yield here
        self._running = list(self._submitted(on_host, make))
        if self._room is not None:
            for _, update in self._running:  # moving states must not overtake their update
                update.result()
            self._fill_room(gradients)

    def _submitted(
        self, gradients: Sequence[GradientBuffer], make: MakeJob
    ) -> Iterator[tuple[GradientBuffer, Future[None]]]:
        for gradient, update in super()._submitted(gradients, make):
            assert isinstance(gradient.storage, HostGradientStorage)
            gradient.storage.turn()
            yield gradient, update

    def settle(self, *, last: bool = False) -> Iterator[Sequence[GradientBuffer]]:
        running, self._running = self._running, []
        yield from self._finished(running)

    def visit(self, buffer: FlatBuffer, *, write: bool = True) -> None:
        for gradient, update in self._running:
            if gradient.buffer is buffer:
                update.result()

    def close(self) -> None:
        """Weights stay as they are, without the last update: each rank has only its part of that, and all would have to
        meet for the rest, where one of them may be ending by an exception."""
        self._running.clear()
        super().close()
