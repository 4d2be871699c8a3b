"""How much of the GPU offloaded states take: which units it updates, and which of them move there for good.

Which units in host memory go up to be updated by the GPU is ``ds_hf.offload.stream``.

Which ones, and whose gradients stay on the device for it, follows from their sizes and the share. "auto" is
``auto_share`` where that pays, else 0. What sizes say of it is in ``why_not``, for the engine and for predictions
without a GPU; the engine's ``AutoShare`` also looks at the machine, where the least of all ranks counts.

The update in host memory is bound by that memory, on either processor: the CPU moves 28 bytes of it for an element of
AdamW, and 2 go up after that; the link 20, where masters are split and the gradient is on the device. One GPU's
link leaves part of the memory's speed to the CPU, those of several GPUs do not. The shares are coarse on purpose: which
kernel updates a unit shows in the last digits, and two runs of one configuration shall be equal.

``ds_hf.offload.ratio: auto`` is found out after the first steps (``Room``): what is free then, at the peak of a whole
step, is taken but for a margin; the least of all ranks counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.link_speed import speed_both_ways
from ds_hf.engine.optim.streamed_updates import SLOTS
from ds_hf.log import log_once, logger

__all__ = [
    "AutoShare",
    "HostUnit",
    "Room",
    "Streaming",
    "auto_share",
    "say_none",
    "slots_room",
    "streaming",
    "why_not",
]

_SLOW, _ALONE, _SEVERAL = 0.3, 0.6, 1.0  # shares: where the link is no faster than the CPU; one GPU; several
_FAST_ALONE = 35e9  # bytes a second each way at once, from which on the link does more than the CPU
_FAST_SEVERAL = 25e9  # where the CPU has as many such tasks as there are processes
_LEAST_SPEED = 20e9  # PCIe 5 moves twice that, PCIe 4 and what is shared less
_HALVED = 11  # bytes of an element's states; AdamW has 10 of them with masters split, and 12 with whole ones
_MISSED = 0.2  # of the states: so far from the share may be what units of these sizes allow
LEAST_STATES = 64 << 20  # bytes; a CPU updates less in a few milliseconds
_LARGE = 1.5  # times the median: such a unit makes slots large, and goes only where the share needs it
_AHEAD = 2  # of the states that go up, one such part at most is on its way at once, or there before the step
_PART = 16  # of the device's memory, one such part may go to slots and to gradients that stay


@dataclass(frozen=True)
class HostUnit:
    """One unit whose states are in host memory.

    Attributes:
        numel: elements that this rank updates.
        states: bytes of master weights and moments that would go up.
        gradient: bytes of the gradient.
        movable: it may be updated elsewhere: its master weights are not the parameters, nor in files.
    """

    numel: int
    states: int
    gradient: int
    movable: bool = True


@dataclass(frozen=True)
class Streaming:
    """What goes over the device.

    Attributes:
        up: for each unit, in the order in which they were made, whether it goes up. They lie between the others.
        stays: whether its gradient waits on the device, and does not go down and up again.
        in_flight: how many are on their way at once.
        slots: bytes on the device for those.
        gradients: bytes of those that stay, at most.
    """

    up: tuple[bool, ...]
    stays: tuple[bool, ...]
    in_flight: int
    slots: int
    gradients: int


def streaming(units: Sequence[HostUnit], share: float, room: int) -> Streaming:
    """Which of ``units`` go up.

    Args:
        share: of the elements.
        room: bytes of the device; what slots leave of it is for gradients, those first that backward makes last.
    """
    up = _going_up(units, share)
    chosen = [unit for unit, goes in zip(units, up, strict=True) if goes]
    each = max((unit.states for unit in chosen), default=0)
    states, gradients = SLOTS * each, sum(unit.gradient for unit in chosen)
    gradient = SLOTS * max((unit.gradient for unit in chosen), default=0)
    if states + gradients <= room:
        most = min(room - gradients, sum(unit.states for unit in chosen) // _AHEAD)
        in_flight = max(SLOTS, most // max(each, 1))
        return Streaming(tuple(up), tuple(up), in_flight, in_flight * each, gradients)
    left, stays = room - states - gradient, []
    for unit, goes in zip(units, up, strict=True):
        stays.append(goes and unit.gradient <= left)
        left -= unit.gradient if stays[-1] else 0
    kept = sum(unit.gradient for unit, stay in zip(units, stays, strict=True) if stay)
    return Streaming(tuple(up), tuple(stays), SLOTS, states + gradient, kept)


def _going_up(units: Sequence[HostUnit], share: float) -> list[bool]:
    movable = [unit.numel for unit in units if unit.movable]
    most = _LARGE * statistics.median(movable) if movable else 0
    if sum(numel for numel in movable if numel <= most) < share * sum(unit.numel for unit in units):
        most = max(movable, default=0)
    total, up, chosen = 0, 0, []
    for unit in units:
        total += unit.numel
        goes = unit.movable and unit.numel <= most and up + unit.numel / 2 <= share * total
        up += unit.numel if goes else 0
        chosen.append(goes)
    return chosen


def slots_room(device_memory: int) -> int:
    """How many bytes of a device may be taken for states on their way and for gradients that wait for them."""
    return device_memory // _PART


def auto_share(units: Sequence[HostUnit], here: int, room: int, speed: float = _FAST_ALONE) -> float:
    """The share for "auto" on a link that is fast enough; 0 where sizes speak against it.

    Args:
        here: processes of one host.
        room: as for ``streaming``.
        speed: bytes a second that the link moves each way at once.
    """
    if why_not(units, room):
        return 0.0
    fast = _FAST_ALONE if here == 1 else _FAST_SEVERAL
    if speed < fast or any(unit.movable and unit.states > _HALVED * unit.numel for unit in units):
        return _SLOW
    share = _ALONE if here == 1 else _SEVERAL
    return _SLOW if why_not(units, room, share) else share


def why_not(units: Sequence[HostUnit], room: int, share: float = _SLOW) -> str:
    """Why sizes speak against streaming ``share`` of the units, in words; empty where they do not.

    Args:
        room: as for ``streaming``.
    """
    total, states = sum(unit.numel for unit in units), sum(unit.states for unit in units)
    if states < LEAST_STATES:
        return f"they are less than {LEAST_STATES >> 20} MiB"
    found = streaming(units, share, room)
    numel = sum(unit.numel for unit, goes in zip(units, found.up, strict=True) if goes)
    if not numel or abs(numel / total - share) > _MISSED:
        return f"they are in too few units ({len(units)}) to send {share:.0%} of them to the GPU"
    if found.slots > room:
        return f"that would take {found.slots / 2**30:.1f} GiB of the device, and {room / 2**30:.1f} may be taken"
    return ""


class AutoShare:
    """Finds the share for "auto", once, when all units are known.

    Args:
        device: where the model computes.
        axis: ranks that must decide alike.
        here: processes of this host, which share its memory.
    """

    def __init__(self, device: torch.device, axis: Axis, here: int = 1) -> None:
        self._device, self._axis, self._here = device, axis, here

    def decide(self, units: Sequence[HostUnit], link: HostLink) -> tuple[float, int]:
        """The share, and the bytes of the device that there are for it; collective.

        Args:
            link: of the store, with nothing on its way.
        """
        # Every rank has the same units and, from here on, the same figures: all return from the same line.
        room = int(self._least(self._room()))
        reason = why_not(units, room)
        if reason:
            say_none(reason)
            return 0.0, room
        speed = self._least(self._speed(link))
        found = f"host and device exchange {speed / 1e9:.0f} GB/s each way at once"
        if speed < _LEAST_SPEED:
            say_none(f"{found}, and it pays from {_LEAST_SPEED / 1e9:.0f} on")
            return 0.0, room
        share = auto_share(units, int(self._least(self._here)), room, speed)
        taken = streaming(units, share, room)
        log_once(
            f"offload: the GPU updates {share:.0%} of the states in host memory (stream: auto): {found}, "
            f"{(taken.slots + taken.gradients) / 2**30:.1f} GiB of the device are taken for them"
        )
        return share, room

    def _room(self) -> int:
        """Bytes of this rank's device that may be taken."""
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return min(slots_room(total), free + cached)

    def _speed(self, link: HostLink) -> float:
        return speed_both_ways(link, lambda: collectives.barrier(self._axis))

    def _least(self, value: float) -> float:
        mine = torch.tensor([-value], dtype=torch.float64, device=self._device)
        return -collectives.all_reduce_max(mine, self._axis, "what offload found on each device").item()


def say_none(reason: str) -> None:
    """Log that "auto" means 0."""
    log_once(f"offload: the CPU updates all states in host memory (stream: auto): {reason}")


_STEPS = 2  # the first makes moments and workspaces, the second has its peak with all of them
_MARGIN = 0.08  # of the device: fragments, longer batches, workspaces of libraries


class Room:
    """Asks the device once.

    Args:
        axis: ranks that must decide alike.
    """

    def __init__(self, device: torch.device, axis: Axis) -> None:
        self._device, self._axis = device, axis
        self._steps = 0

    @property
    def decided(self) -> bool:
        """``nbytes_for_states`` has given its answer."""
        return self._steps >= _STEPS

    def nbytes_for_states(self) -> int | None:
        """Bytes that may move to the device now; ``None`` at every step but one. Collective in that step."""
        self._steps += 1
        if self._steps != _STEPS:
            return None
        mine = torch.tensor([-self.free_nbytes()], dtype=torch.float64, device=self._device)
        left = max(0, int(-collectives.all_reduce_max(mine, self._axis, "the free memory of devices").item()))
        if self._axis.rank == 0:
            logger.info("offload: %.1f GiB of the device are free for optimizer states", left / 2**30)
        return left

    def free_nbytes(self) -> int:
        """Bytes beyond the peak so far, less the margin. Without a CUDA device nothing is gained by moving."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return int(total * (1 - _MARGIN)) - others - torch.cuda.max_memory_allocated(self._device)
