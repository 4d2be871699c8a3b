"""The whole weights of an engine, held for many calls.

Nothing to gather (stages 0 to 2): what is under way after a step is waited for, once. Sharded: all units are gathered
if they and what the call needs fit on every rank, else the hooks gather unit after unit inside each forward, and ranks
have to run equally many of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_hf import host
from ds_hf.engine.comm.collectives import all_reduce_max
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.buffer import BufferState, FlatBuffer, unshard
from ds_hf.engine.zero.unit import Unit
from ds_hf.log import log_once

__all__ = ["WholeWeights", "backup_device", "free_nbytes"]

_SPARE = 0.05  # of a device's memory: what fragments, and kernels that want a workspace


class WholeWeights:
    """Gathers and holds.

    Args:
        units: of the engine.
        world: all its processes, which decide together.
        device: where it computes.
        whole: gather all units where they fit (``hybrid_engine.pin_parameters``).
        exchanges: every forward sends something to other processes, whole or not: tokens to their experts.
    """

    def __init__(
        self, units: Sequence[Unit], world: Axis, device: torch.device, *, whole: bool = True, exchanges: bool = False
    ) -> None:
        self._units = units
        self._world, self._device, self._whole, self._exchanges = world, device, whole, exchanges
        self._holds = 0

    @property
    def buffers(self) -> list[FlatBuffer]:
        """Asked for each time: what is unfrozen amid a run moves to another."""
        return [buffer for unit in self._units for buffer in unit.buffers]

    @property
    def sharded(self) -> list[FlatBuffer]:
        return [buffer for buffer in self.buffers if buffer.sharded]

    @property
    def are_whole(self) -> bool:
        """Whether a forward now gathers nothing: everything is here and stays."""
        return all(buffer.state is BufferState.GATHERED and buffer.hold.count > 0 for buffer in self.sharded)

    @property
    def runs_in_step(self) -> bool:
        """Whether a forward now communicates, so that ranks have to run equally many."""
        apart = (buffer for buffer in self.sharded if buffer.state is not BufferState.GATHERED)
        return self._exchanges or any(buffer.gathering.over.world_size > 1 for buffer in apart)

    @contextmanager
    def held(self, more_nbytes: int = 0, *, keep: bool = False) -> Iterator[bool]:
        """Hold the whole weights inside, if they fit. Collective where something is to be gathered; may be nested.

        Args:
            more_nbytes: what will be needed beside them.
            keep: their memory stays with the engine afterwards, so that they come to the same addresses next time.

        Yields:
            whether they are whole.
        """
        for buffer in self.buffers:
            if not buffer.sharded:
                buffer.gather()  # after a step it may be on its way
        if self.are_whole:
            yield True
            return
        if not (self._whole and self._fit(more_nbytes)):
            yield False
            return
        self.keep_memory(keep)
        with unshard(self.sharded):
            yield True

    @property
    def stay_in_place(self) -> bool:
        """Whether the weights are at the same addresses whenever they are whole."""
        return all(buffer.aliased or buffer.keeps_memory for buffer in self.sharded)

    def keep_memory(self, keep: bool = True) -> None:
        """From now on the memory of the whole weights stays once they were gathered."""
        for buffer in self.sharded if keep else ():
            buffer.keeps_memory = True

    def give_back(self) -> None:
        """Memory that ``keep`` left with the engine."""
        for buffer in self.sharded:
            buffer.drop_memory()

    def _fit(self, more_nbytes: int) -> bool:
        """Whether the weights fit beside what is there, on every rank. Collective."""
        needed = sum(buffer.missing_nbytes for buffer in self.sharded)
        free = free_nbytes(self._device)
        lacking = torch.tensor(float(needed + more_nbytes > free), dtype=torch.float32, device=self._device)
        if not bool(all_reduce_max(lacking, self._world, "whether the whole weights fit").item()):
            return True
        log_once(
            f"generation: the whole weights need {needed / 2**30:.2f} GiB, and {more_nbytes / 2**30:.2f} for the call, "
            f"where {free / 2**30:.2f} GiB are free on this rank; one of the ranks has not enough: units are gathered "
            "inside each forward"
        )
        return False


def free_nbytes(device: torch.device) -> int:
    """Bytes that this process can still have on ``device``, with a margin."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached - _SPARE * total)
    return host.available_memory() // host.local_world_size()


def backup_device(nbytes: int, device: torch.device) -> torch.device:
    """Where a copy of ``nbytes`` of weights is put: beside them, or in host memory."""
    return device if nbytes <= free_nbytes(device) else torch.device("cpu")
