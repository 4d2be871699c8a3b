"""States in host memory that are updated by the GPU: up, one kernel, down again, some units on the way at once.

It uses streams of its own and lets others' copies between, so that the parameters that the CPU finishes meanwhile do
not queue behind states. Order on the device, with n units on the way: up(i) after down(i - n), which had the same
memory; update(i) after up(i); down(i) after update(i); and up(i) in the next step after down(i) in this one. Gradients
that are on the device stay where they are, and are kept until the update has read them.

Those that come first may go up before the step that updates them (``ahead``). What is in host memory stays the truth:
where it may have been written to since, the states go up again.

What the CPU updates meanwhile leaves host memory through ``Outputs``, which uses the same link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hf.engine.comm.streams import CommStream, wait
from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.link import DONE, Arrival, HostLink, new_stream
from ds_hf.engine.offload.memory import host_empty
from ds_hf.engine.optim.store import Job, update_target, written_beside
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.storage import HostGradientStorage

__all__ = ["SLOTS", "InFlightUpdate", "Outputs", "StreamedUpdates"]

SLOTS = 2  # units on the way at least; each has memory for the largest that went there


class _Slot:
    def __init__(self) -> None:
        self.states = torch.empty(0, dtype=torch.uint8)
        self.grads = torch.empty(0, dtype=torch.uint8)
        self.free: Arrival = DONE
        self.ahead: Block | None = None  # whose states are here, or on their way, for the next step
        self.writes: list[int] = []  # of that block, when they went

    def reserve(self, device: torch.device, states: int, grads: int) -> bool:
        """Memory for so many bytes; whether it was there already."""
        enough = True
        if self.states.numel() < states or self.states.device != device:
            self.free.on_host()
            self.states, enough = torch.empty(states, dtype=torch.uint8, device=device), False
        if grads and (self.grads.numel() < grads or self.grads.device != device):
            self.free.on_host()
            self.grads, enough = torch.empty(grads, dtype=torch.uint8, device=device), False
        return enough


@dataclass(eq=False)
class InFlightUpdate:
    """One unit's update beside what the current stream does.

    Args:
        done: recorded behind it.
        job: keeps what the update reads beside the gradients.
        grads: on the device.
    """

    done: torch.cuda.Event
    job: Job
    grads: Sequence[Tensor]

    def wait(self) -> None:
        """The current stream goes on after it, and may have the memory of the gradients."""
        wait(self.done)
        self.grads = ()

    def precede(self, *comm_streams: CommStream) -> None:
        """What these streams are given from now on comes after it.

        Args:
            comm_streams: among them the one whose memory the gradients are in.
        """
        for comm_stream in comm_streams:
            with comm_stream:
                wait(self.done)
        self.grads = ()


class StreamedUpdates:
    """Updates by the GPU of states that rest in host memory: H2D, one kernel, D2H.

    Args:
        device: where the model computes.
        pinned: see ``host_empty``.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self._link = HostLink(device, yielding=True)
        self._stream = new_stream(device)
        self._slots: list[_Slot] = []
        self._turn = 0
        self.open(SLOTS)
        self._down: dict[Block, Arrival] = {}
        self._in_flight: dict[Block, InFlightUpdate] = {}  # as long as the GPU may read what they hold

    def open(self, slots: int) -> None:
        """So many units are on the way at once from now on; call while there are none."""
        self._slots, self._turn = [_Slot() for _ in range(slots)], 0

    def start(self, block: Block, job: Job, owned: Tensor) -> InFlightUpdate | None:
        """Update one unit, parameters in ``owned`` on the device; wait for it before their use.

        The states are back when ``arrived`` returns.
        """
        if self._stream is None:
            self._update(block, job, owned)
            return None
        if block in self._in_flight:  # its memory may go back to the current stream once that comes after its update
            self._in_flight.pop(block).wait()
        grads = [grad for grad in job.grads if grad is not None and grad.device == self._device]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._update(block, job, owned)
            self._in_flight[block] = update = InFlightUpdate(self._stream.record_event(), job, grads)
        return update

    def _update(self, block: Block, job: Job, owned: Tensor) -> None:
        self._to_host(block)
        host = block.memory
        assert host is not None
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        (grads,) = job.grads
        below = grads is not None and grads.device != self._device
        came = slot.free if slot.ahead is block and slot.writes == block.writes else None
        slot.ahead = None
        there = slot.reserve(self._device, host.numel(), grads.nbytes if grads is not None and below else 0)
        free = slot.free if there else self._link.now()
        states = slot.states[: host.numel()]
        (came or self._link.up(states, host, after=self._down.get(block, DONE), unused=free)).on_stream()
        if grads is not None and below:
            place = slot.grads[: grads.nbytes].view(grads.dtype)
            self._link.up(place, grads, unused=free).on_stream()
            job.grads[0] = place
        block.attach(states)
        out = update_target(owned, block.values)
        job([out])
        if out is not None and out is not owned:
            self._link.down(owned, out).on_host()
        if block.in_memory:
            slot.free = self._down[block] = self._link.down(host, states, kept=True)
            block.attach(host)
        else:  # the first update has made moments
            self._to_host(block)

    def ahead(self, blocks: Sequence[Block]) -> None:
        """The next step updates ``blocks`` in this order: the first go up now. Writes that torch does not count are
        announced by ``arrived``."""
        if self._stream is None:
            return self._ahead(blocks)
        with torch.cuda.stream(self._stream):
            return self._ahead(blocks)

    def _ahead(self, blocks: Sequence[Block]) -> None:
        for index, block in enumerate(blocks[: len(self._slots)]):
            slot, host = self._slots[(self._turn + index) % len(self._slots)], block.memory
            if host is None or not block.in_memory or slot.states.numel() < host.numel():
                break
            after = self._down.get(block, DONE)
            slot.free = self._link.up(slot.states[: host.numel()], host, after=after, unused=slot.free)
            slot.ahead, slot.writes = block, block.writes

    def _to_host(self, block: Block) -> None:
        """Give the block memory on the host that holds all its planes."""
        if block.memory is None or block.memory.device.type != "cpu" or not block.in_memory:
            self.arrived(block)
            block.adopt(host_empty(block.nbytes, torch.uint8, pinned=self._pinned))

    def arrived(self, block: Block, *, write: bool = True) -> None:
        """Return when the states are in host memory.

        Args:
            write: they may be written to there, or their memory given back: what went up ahead is not used.
        """
        self._down.pop(block, DONE).on_host()
        for slot in self._slots if write else ():
            if slot.ahead is block:
                slot.free.on_host()
                slot.ahead = None

    def close(self) -> None:
        """Wait, and give the device's memory back; later updates take new memory."""
        self._link.close()
        if self._stream is not None:
            self._stream.synchronize()
        self._in_flight.clear()
        self._down.clear()
        self.open(len(self._slots))


class Outputs:
    """Host memory that updates write to, and the copies from there.

    Args:
        pinned: see ``host_empty``.
        at_once: parameters in host memory are written by the update itself; else by ``finish``, because they may be
            read meanwhile.
    """

    def __init__(self, link: HostLink, *, pinned: bool, at_once: bool = True) -> None:
        self._link, self._pinned, self._at_once = link, pinned, at_once
        self._own: dict[GradientBuffer, Tensor] = {}
        self._written: dict[GradientBuffer, tuple[Tensor, Tensor]] = {}

    def begin(self, gradient: GradientBuffer, master: Tensor) -> Tensor | None:
        """Where the unit's update writes parameters; ``None`` where the master is the parameters."""
        buffer = gradient.buffer
        shard = buffer.full if gradient.policy.whole else buffer.shard
        if self._at_once and buffer.stays and shard.device.type == "cpu":
            return written_beside(buffer.owned(whole=gradient.policy.whole, fresh=True), master)
        between = self._between(gradient, shard)
        self._written[gradient] = between, shard
        return between

    def _between(self, gradient: GradientBuffer, shard: Tensor) -> Tensor:
        storage = gradient.storage
        spare = storage.spare(shard.numel(), shard.dtype) if isinstance(storage, HostGradientStorage) else None
        if spare is not None:
            return spare
        if gradient not in self._own:
            self._own[gradient] = host_empty(shard.numel(), shard.dtype, pinned=self._pinned)
        return self._own[gradient]

    def finish(self, gradient: GradientBuffer, unused: Arrival | None = None) -> None:
        """The update is over: what the current stream gets from now on may use the parameters.

        Args:
            unused: when the parameters' old values are of no use any more, see ``HostLink.up``.
        """
        if gradient in self._written:
            between, shard = self._written.pop(gradient)
            buffer = gradient.buffer
            if buffer.aliased and buffer.gathering.region is None:
                owned = shard
            else:  # it may have been somewhere else meanwhile, or others may still read it
                owned = buffer.owned(whole=gradient.policy.whole, fresh=True)
            self._link.up(owned, between, unused=unused).on_stream()

    def drop(self, gradient: GradientBuffer) -> None:
        """The unit is not updated on the CPU any more."""
        self._own.pop(gradient, None)

    def close(self) -> None:
        """Give the memory back."""
        self._own.clear()
        self._written.clear()
