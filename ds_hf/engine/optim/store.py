"""Where optimizer states live and where they are updated: the interface, and the store for states beside the model.

The optimizer gives a store its units and asks for them back, some at a time, when their parameters have their new
values. What happens in between - copies, threads, files - is the store's affair; ``optim/host_store.py`` and
``optim/file_store.py`` are the others. Units come back in an order that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.ops.split_master import LOW
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.storage import DeviceGradientStorage, GradientStorage, HostGradientStorage

__all__ = [
    "DeviceStore",
    "FrozenGroup",
    "HostSettings",
    "Job",
    "MakeJob",
    "StateStore",
    "update_target",
    "written_beside",
]


class Job(Protocol):
    """The update of some units, with the gradients it took over.

    Attributes:
        grads: of each unit, flat, over what the rank owns; ``None`` where there is none.
        idle: the host knows that it will change nothing, and write to no ``out``: there is no gradient, or the step is
            not made.
    """

    grads: list[Tensor | None]

    @property
    def idle(self) -> bool: ...

    def __call__(self, outs: Sequence[Tensor | None]) -> None:
        """Update the states, where they are now; the 16-bit parameters of each unit go to its ``out``."""


MakeJob = Callable[[Sequence[GradientBuffer]], Job]

_LEAST_NUMEL = 1 << 24  # of a launch: 0.1 ms of an H100's memory bandwidth


class StateStore(Protocol):
    """Keeps masters and moments of every trainable buffer.

    Attributes:
        device: where states are when they are updated.
        splits: not all states can be in memory at once, or they are on several devices: rules that look at whole
            parameters cannot work here.
        takes_split_masters: masters may be the parameters, with their low bits beside them.
        delays: updates go on while the parameters are in use, which follow their masters later.
        skips: ``stream`` may begin before the host knows whether the step is made; it changes nothing where the
            skip flag forbids it.
    """

    device: torch.device
    splits: str | None
    takes_split_masters: bool
    delays: bool
    skips: bool

    def place(self, buffer: FlatBuffer, owned: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Master weights for ``buffer`` from exact ``values``; possibly ``owned``, the parameters themselves."""

    def gradient_storage(self, buffer: FlatBuffer) -> GradientStorage:
        """Where the gradients of ``buffer`` go."""

    def bind(self, inner: Optimizer, segments: Mapping[GradientBuffer, Sequence[Segment]]) -> Sequence[FlatBuffer]:
        """The masters were cut into segments, and ``inner`` keeps moments for them; again when there are others. Then
        what is placed stays where it is. Collective the first time.

        Returns:
            those whose masters shall be split from now on.
        """

    def place_low_bits(self, buffer: FlatBuffer) -> Tensor:
        """Memory for the low bits of the buffer's masters, which are the parameters from now on."""

    def stream(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> Iterator[Sequence[GradientBuffer]]:
        """Update every unit; yields those whose weights may be synced, all ranks in the same order."""

    def visit(self, buffer: FlatBuffer, *, write: bool = True) -> None:
        """Return when the buffer's states may be used, until those of another buffer are visited."""

    def wait_for_states(self) -> None:
        """Return when the states of all buffers are where they rest, and may be read and written there."""

    def kept_apart(self) -> Mapping[str, Sequence[Tensor]]:
        """What the step needs beside masters and moments, by names of ``OffloadStateTypeEnum``."""

    def settle(self, *, last: bool = False) -> Iterator[Sequence[GradientBuffer]]:
        """Finish updates that go on beside training; yields units whose weights are to be synced.

        Args:
            last: make those that were put off, too: states are saved, or replaced.
        """

    def close(self) -> None:
        """Give memory, threads and files back."""


@dataclass(frozen=True)
class HostSettings:
    """How states are offloaded.

    Attributes:
        numel: elements of all masters of this rank.
        device_share: share of the states that stays on the device, 0 to 1.
        streamed_share: share of the rest that goes up to be updated.
        pinned: page-lock the host memory.
        accumulates: a step has several micro-batches.
        accumulation_dtype: of sums over them.
        moments_nbytes: bytes of an element's moments, once they are there.
        split: of fp32 masters that go up only the bits are kept that bf16 parameters on the device lack.
        room: bytes of the device that may be taken for what goes up.
    """

    numel: int
    device_share: float = 0.0
    streamed_share: float = 0.0
    pinned: bool = True
    accumulates: bool = False
    accumulation_dtype: torch.dtype = torch.float32
    moments_nbytes: int = 8
    split: bool = False
    room: int = 0

    def new_gradient_storage(self, link: HostLink, worker: Worker, places: int = 1) -> GradientStorage:
        """Where the gradients of one more buffer go."""
        return HostGradientStorage(
            link,
            worker,
            self.accumulation_dtype,
            accumulates=self.accumulates,
            pinned=self.pinned,
            places=places,
        )


def update_target(owned: Tensor, master: Tensor) -> Tensor | None:
    """As ``written_beside``, on the device of the master: the caller copies it where that is not the parameters'. It
    has their values already, for an update that is forbidden leaves it alone."""
    if owned.device == master.device:
        return written_beside(owned, master)
    return master.to(owned.dtype, copy=True)


def written_beside(owned: Tensor, master: Tensor) -> Tensor | None:
    """Where an update writes parameters that are beside the master; ``None`` where the master is the parameters."""
    return None if owned.data_ptr() == master.data_ptr() else owned


class DeviceStore:
    """States beside the model, always there."""

    splits: str | None = None
    takes_split_masters = True
    delays = False

    def __init__(self, device: torch.device, accumulation_dtype: torch.dtype) -> None:
        self.device = device
        self.skips = device.type == "cuda"  # the kernels look for themselves
        self._accumulation_dtype = accumulation_dtype
        self._masters: dict[FlatBuffer, Tensor] = {}

    def place(self, buffer: FlatBuffer, owned: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        same = owned.dtype == dtype and owned.device == self.device and buffer.stays
        master = owned if same else values.to(device=self.device, dtype=dtype, copy=True)
        self._masters[buffer] = master
        return master

    def gradient_storage(self, buffer: FlatBuffer) -> GradientStorage:
        return DeviceGradientStorage(self._accumulation_dtype)

    def bind(self, inner: Optimizer, segments: Mapping[GradientBuffer, Sequence[Segment]]) -> Sequence[FlatBuffer]:
        return ()  # states never move

    def place_low_bits(self, buffer: FlatBuffer) -> Tensor:
        return torch.empty_like(self._masters[buffer], dtype=LOW)

    def stream(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> Iterator[Sequence[GradientBuffer]]:
        for batch in self._batches(gradients):
            owned = [g.buffer.owned(whole=g.policy.whole) for g in batch]
            outs = [update_target(o, self._masters[g.buffer]) for o, g in zip(owned, batch, strict=True)]
            make(batch)(outs)
            for target, out in zip(owned, outs, strict=True):
                if out is not None and out is not target:
                    target.copy_(out)
            yield batch

    def _batches(self, gradients: Sequence[GradientBuffer]) -> Iterator[list[GradientBuffer]]:
        """What is updated and synced together: a quarter, which on a GPU is gathered during the update of the rest,
        for a launch costs as much as the update of a million elements; ranks of small models on the CPU wait for each
        other once. Parameters in files, and on the CPU bf16 masters, whose roundings each call draws: one unit."""
        by_unit = self.device.type == "cpu" and torch.bfloat16 in {master.dtype for master in self._masters.values()}
        together = [gradient for gradient in gradients if gradient.buffer.stays and not by_unit]
        numels = accumulate(self._masters[gradient.buffer].numel() for gradient in together)
        quarter = max(sum(self._masters[gradient.buffer].numel() for gradient in together) // 4, _LEAST_NUMEL)
        first = sum(numel <= quarter for numel in numels)
        yield from (batch for batch in (together[:first], together[first:]) if batch)
        yield from ([gradient] for gradient in gradients if by_unit or not gradient.buffer.stays)

    def visit(self, buffer: FlatBuffer, *, write: bool = True) -> None:
        """They are always there."""

    def wait_for_states(self) -> None:
        """They are always there."""

    def kept_apart(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def settle(self, *, last: bool = False) -> Iterator[Sequence[GradientBuffer]]:
        return iter(())

    def close(self) -> None:
        self._masters.clear()


class FrozenGroup(dict[str, Any]):
    """A parameter group as it is now, for an update that may run after a scheduler has changed the live one.

    What an update writes (it counts its roundings) goes to both.
    """

    def __init__(self, live: dict[str, Any]) -> None:
        super().__init__(live)
        self._live = live

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._live[key] = value
