"""States in host memory that are updated by the GPU: up, one kernel, down again, some units on the way at once.

It uses streams of its own and lets others' copies between, so that the parameters that the CPU finishes meanwhile do
not queue behind states. Order on the device, with n units on the way: up(i) after down(i - n), which had the same
memory; update(i) after up(i); down(i) after update(i); and up(i) in the next step after down(i) in this one. Gradients
that are on the device stay where they are, and are kept until the update has read them.

Those that come first may go up before the step that updates them (``ahead``). What is in host memory stays the truth:
where somebody may have written to it since, the states go up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hf.engine.dist.streams import Lane, wait
from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.link import DONE, Arrival, Link, new_stream
from ds_hf.engine.offload.memory import host_empty
from ds_hf.engine.optim.store import Job, update_target

__all__ = ["SLOTS", "Detour", "Way"]

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
class Way:
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

    def precede(self, *lanes: Lane) -> None:
        """What these lanes are given from now on comes after it.

        Args:
            lanes: among them the one whose memory the gradients are in.
        """
        for lane in lanes:
            with lane:
                wait(self.done)
        self.grads = ()


class Detour:
    """The way over the device.

    Args:
        device: where the model computes.
        pinned: see ``host_empty``.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self._link = Link(device, yielding=True)
        self._stream = new_stream(device)
        self._slots: list[_Slot] = []
        self._turn = 0
        self.open(SLOTS)
        self._down: dict[Block, Arrival] = {}
        self._ways: dict[Block, Way] = {}  # as long as the GPU may read what they hold

    def open(self, slots: int) -> None:
        """So many units are on the way at once from now on; call while there are none."""
        self._slots, self._turn = [_Slot() for _ in range(slots)], 0

    def go(self, block: Block, job: Job, owned: Tensor) -> Way | None:
        """Update one unit, parameters in ``owned`` on the device; wait for it before their use.

        The states are back when ``arrived`` returns.
        """
        if self._stream is None:
            self._over(block, job, owned)
            return None
        if block in self._ways:  # its memory may go back to the current stream once that comes after its update
            self._ways.pop(block).wait()
        grads = [grad for grad in job.grads if grad is not None and grad.device == self._device]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._over(block, job, owned)
            self._ways[block] = way = Way(self._stream.record_event(), job, grads)
        return way

    def _over(self, block: Block, job: Job, owned: Tensor) -> None:
        self._home(block)
        home = block.memory
        assert home is not None
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        (grads,) = job.grads
        below = grads is not None and grads.device != self._device
        came = slot.free if slot.ahead is block and slot.writes == block.writes else None
        slot.ahead = None
        there = slot.reserve(self._device, home.numel(), grads.nbytes if grads is not None and below else 0)
        free = slot.free if there else self._link.now()
        states = slot.states[: home.numel()]
        (came or self._link.up(states, home, after=self._down.get(block, DONE), unused=free)).on_stream()
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
            slot.free = self._down[block] = self._link.down(home, states, kept=True)
            block.attach(home)
        else:  # the first update has made moments
            self._home(block)

    def ahead(self, blocks: Sequence[Block]) -> None:
        """The next step updates ``blocks`` in this order: the first go up now. Writes that torch does not count are
        announced by ``arrived``."""
        if self._stream is None:
            return self._ahead(blocks)
        with torch.cuda.stream(self._stream):
            return self._ahead(blocks)

    def _ahead(self, blocks: Sequence[Block]) -> None:
        for index, block in enumerate(blocks[: len(self._slots)]):
            slot, home = self._slots[(self._turn + index) % len(self._slots)], block.memory
            if home is None or not block.in_memory or slot.states.numel() < home.numel():
                break
            after = self._down.get(block, DONE)
            slot.free = self._link.up(slot.states[: home.numel()], home, after=after, unused=slot.free)
            slot.ahead, slot.writes = block, block.writes

    def _home(self, block: Block) -> None:
        """Give the block memory on the host that holds all its planes."""
        if block.memory is None or block.memory.device.type != "cpu" or not block.in_memory:
            self.arrived(block)
            block.adopt(host_empty(block.nbytes, torch.uint8, pinned=self._pinned))

    def arrived(self, block: Block, *, write: bool = True) -> None:
        """Return when the states are in host memory.

        Args:
            write: somebody may write to them there, or give the memory back: what went up ahead is not used.
        """
        self._down.pop(block, DONE).on_host()
        for slot in self._slots if write else ():
            if slot.ahead is block:
                slot.free.on_host()
                slot.ahead = None

    def close(self) -> None:
        """Wait, and give the device's memory back; whoever goes this way again takes new memory."""
        self._link.close()
        if self._stream is not None:
            self._stream.synchronize()
        self._ways.clear()
        self._down.clear()
        self.open(len(self._slots))
