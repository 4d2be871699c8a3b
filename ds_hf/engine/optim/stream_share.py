"""How many of the units in host memory go up to be updated by the GPU, and which: ``ds_hf.offload.stream``.

Which ones follows from their sizes and the share, so that it is the same on every rank. "auto" is ``AUTO_SHARE`` where
that pays, else 0. What sizes say of it is in ``why_not``, for the engine and for predictions without a GPU; the
engine's ``AutoShare`` also looks at the machine, where the least of all ranks counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.offload.link import Link
from ds_hf.engine.offload.link_speed import speed_both_ways
from ds_hf.engine.optim.detour import SLOTS
from ds_hf.log import log_once

__all__ = ["AUTO_SHARE", "AutoShare", "HostUnit", "going_up", "say_none", "slots_nbytes", "slots_room", "why_not"]

AUTO_SHARE = 0.3  # 2.7 B on an H100: 1070 ms a step without, 910 with it, 963 at 0.5 (docs/performance.md)
_MOST = 0.5  # of the states that may really go, where there are so few units that the share is only roughly kept
_LEAST_STATES = 64 << 20  # bytes; a CPU updates less in a few milliseconds
_LEAST_SPEED = 20e9  # bytes a second each way at once; PCIe 5 moves twice that, PCIe 4 and what is shared less
_PART = 32  # of the device's memory, one such part may go to slots


@dataclass(frozen=True)
class HostUnit:
    """One unit whose states are in host memory.

    Attributes:
        numel: elements that this rank updates.
        states: bytes of master weights and moments.
        gradient: bytes that go up with them.
        movable: it may be updated elsewhere: its master weights are not the parameters, nor in files.
    """

    numel: int
    states: int
    gradient: int
    movable: bool = True


def going_up(units: Sequence[HostUnit], share: float) -> list[bool]:
    """For each unit, in the order in which they were made, whether it goes up. They lie between the others."""
    total, up, chosen = 0, 0, []
    for unit in units:
        total += unit.numel
        goes = unit.movable and up + unit.numel / 2 <= share * total
        up += unit.numel if goes else 0
        chosen.append(goes)
    return chosen


def slots_nbytes(units: Sequence[HostUnit], share: float) -> int:
    """Bytes on the device that the ways of those units take."""
    chosen = [unit for unit, goes in zip(units, going_up(units, share), strict=True) if goes]
    return SLOTS * (max((u.states for u in chosen), default=0) + max((u.gradient for u in chosen), default=0))


def slots_room(device_memory: int) -> int:
    """How many bytes of a device the slots may take with "auto"."""
    return device_memory // _PART


def why_not(units: Sequence[HostUnit], room: int) -> str:
    """Why sizes speak against ``AUTO_SHARE``, in words; empty where they do not.

    Args:
        room: bytes of the device that slots may take.
    """
    states, slots = sum(unit.states for unit in units), slots_nbytes(units, AUTO_SHARE)
    if states < _LEAST_STATES:
        return f"they are less than {_LEAST_STATES >> 20} MiB"
    numel = sum(unit.numel for unit, goes in zip(units, going_up(units, AUTO_SHARE), strict=True) if goes)
    if not 0 < numel <= _MOST * sum(unit.numel for unit in units):
        return f"they are in too few units ({len(units)}) to send {AUTO_SHARE:.0%} of them to the GPU"
    if slots > room:
        return f"that would take {slots / 2**30:.1f} GiB of the device, and {room / 2**30:.1f} may be taken"
    return ""


class AutoShare:
    """Finds the share for "auto", once, when all units are known.

    Args:
        device: where the model computes.
        axis: ranks that must decide alike.
    """

    def __init__(self, device: torch.device, axis: Axis) -> None:
        self._device, self._axis = device, axis

    def decide(self, units: Sequence[HostUnit], link: Link) -> float:
        """The share; collective.

        Args:
            link: of the store, with nothing on its way.
        """
        # Every rank has the same units and, from here on, the same figures: all return from the same line.
        reason = why_not(units, int(self._least(self._room())))
        if reason:
            say_none(reason)
            return 0.0
        speed = self._least(self._speed(link))
        found = f"host and device exchange {speed / 1e9:.0f} GB/s each way at once"
        if speed < _LEAST_SPEED:
            say_none(f"{found}, and it pays from {_LEAST_SPEED / 1e9:.0f} on")
            return 0.0
        log_once(
            f"offload: the GPU updates {AUTO_SHARE:.0%} of the states in host memory (stream: auto): {found}, "
            f"{slots_nbytes(units, AUTO_SHARE) / 2**30:.1f} GiB of the device are taken for them"
        )
        return AUTO_SHARE

    def _room(self) -> int:
        """Bytes of this rank's device that slots may take."""
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return min(slots_room(total), free + cached)

    def _speed(self, link: Link) -> float:
        return speed_both_ways(link, lambda: collectives.barrier(self._axis))

    def _least(self, value: float) -> float:
        mine = torch.tensor([-value], dtype=torch.float64, device=self._device)
        return -collectives.all_reduce_max(mine, self._axis, "what offload found on each device").item()


def say_none(reason: str) -> None:
    """Log that "auto" means 0."""
    log_once(f"offload: the CPU updates all states in host memory (stream: auto): {reason}")
