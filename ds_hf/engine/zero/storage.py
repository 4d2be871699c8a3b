"""Where the shards of parameters and of gradients are kept between uses: on the device, in host memory, in files.

``ShardStorage`` keeps the shard of a sharded flat buffer and brings it to the device before a gather. It never
communicates: shards come up early in an order that each process learns by itself, from the gathers of the step before,
and a wrong guess costs a copy and no more.

``GradientStorage`` keeps reduced gradients until the optimizer reads them. On the device they stay as they are.
Offloaded ones go down while backward goes on. Sums over micro-batches are taken in host memory by the worker, which
has nothing else to do during backward: on the device they would take four bytes a parameter, of what offload is to
spare. Either way the squared norm is known when backward ends: of what is not summed, the device takes it before the
copy; of sums, the worker.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.link import DONE, Arrival, HostLink
from ds_hf.engine.offload.memory import host_copy, host_empty
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.ops import library as ops

__all__ = [
    "DeviceGradientStorage",
    "DeviceShardStorage",
    "FetchOrder",
    "FileShardStorage",
    "GradientStorage",
    "HostGradientStorage",
    "HostShardStorage",
    "ShardStorage",
    "differ",
    "summed_in",
]


class ShardStorage(Protocol):
    """Keeps the shard of one buffer.

    Attributes:
        apart: the shard never is a part of the gathered parameters.
        stays: it is in memory all the time.
    """

    apart: bool
    stays: bool

    def keep(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy of ``values``, ``[shard_numel]`` in the parameters' dtype, where shards rest; ``into`` memory that is
        there already."""

    def visit(self, *, write: bool, fresh: bool = False) -> None:
        """Return when the tensor that ``keep`` gave may be used; until something else is visited.

        Args:
            write: it will be written to, and ``changed`` be called.
            fresh: all of it will be: its values need not be there.
        """

    def fetch(self) -> Tensor:
        """The values on the device, ``[shard_numel]`` in the parameters' dtype, for what the current stream enqueues
        next."""

    def changed(self) -> None:
        """The shard was written to: what was fetched ahead is stale."""

    def close(self) -> None:
        """Give the memory, and the file, back: the values have another place."""


class DeviceShardStorage:
    """Where the model computes, or plainly on another device."""

    stays = True

    def __init__(self, device: torch.device, rest_device: torch.device) -> None:
        self.apart = rest_device != device
        self._device, self._rest_device = device, rest_device
        self._shard: Tensor | None = None

    def keep(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        self._shard = values.to(self._rest_device, copy=True) if into is None else into.copy_(values)
        return self._shard

    def visit(self, *, write: bool, fresh: bool = False) -> None:
        """It is always there."""

    def fetch(self) -> Tensor:
        assert self._shard is not None
        return self._shard.to(self._device, non_blocking=True)

    def changed(self) -> None:
        """Nothing is fetched ahead."""

    def close(self) -> None:
        self._shard = None


class Follower(Protocol):
    """A shard that can come up before it is asked for."""

    def prefetch(self) -> None:
        """It is probably next."""

    def prepare(self) -> None:
        """It comes soon after the next."""


class FetchOrder:
    """Which shard is fetched after which: guessed from what followed the same two fetches the last time.

    Two tell forward from backward, where the units come the other way round.

    Args:
        depth: how many fetches are looked ahead.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._after: dict[tuple[Follower | None, Follower], Follower] = {}
        self._last: tuple[Follower | None, Follower] | None = None

    def fetched(self, shard: Follower) -> None:
        """Note that ``shard`` is fetched now, and begin with what probably comes next."""
        before = None
        if self._last is not None:
            self._after[self._last] = shard
            before = self._last[1]
        place = self._last = (before, shard)
        for step in range(min(self._depth, len(self._after))):
            following = self._after.get(place)
            if following is None or following is shard:
                return
            if step == 0:
                following.prefetch()
            else:
                following.prepare()
            place = (place[1], following)

    def forget(self) -> None:
        """Guess nothing before it is seen again: there are other shards."""
        self._after.clear()
        self._last = None


class HostShardStorage:
    """In host memory; the shard that comes next is copied up while the device computes.

    Args:
        order: shared by all shards of an engine.
        pinned: see ``host_empty``.
    """

    apart = stays = True

    def __init__(self, link: HostLink, order: FetchOrder, *, pinned: bool) -> None:
        self._link, self._order, self._pinned = link, order, pinned
        self._shard: Tensor | None = None
        self._ahead: tuple[Tensor, Arrival] | None = None

    def keep(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        self._shard = host_copy(values, values.dtype, pinned=self._pinned)
        return self._shard

    def visit(self, *, write: bool, fresh: bool = False) -> None:
        """It is always there."""

    def fetch(self) -> Tensor:
        values, arrival = self._ahead or self._start()
        self._ahead = None
        self._order.fetched(self)
        arrival.on_stream()
        return values

    def prefetch(self) -> None:
        """Start to copy it up."""
        if self._ahead is None:
            self._ahead = self._start()

    def prepare(self) -> None:
        """It is in host memory already."""

    def _start(self) -> tuple[Tensor, Arrival]:
        assert self._shard is not None
        return self._link.fetch(self._shard)

    def changed(self) -> None:
        if self._ahead is not None:
            self._ahead[1].on_host()  # a copy from memory that is about to be written to again
        self._ahead = None

    def close(self) -> None:
        self.changed()
        self._order.forget()
        self._shard = None


class FileShardStorage:
    """In a file; the shards that come next are read while the device computes, and then copied up.

    Args:
        pool: of all shards of an engine that rest in files.
        order: shared by all shards of an engine.
        name: of the file.
    """

    apart, stays = True, False

    def __init__(self, pool: SwapPool, link: HostLink, order: FetchOrder, name: str) -> None:
        self._pool, self._link, self._order, self._name = pool, link, order, name
        self._block: Block | None = None

    def keep(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        self._block = Block(values.to("cpu", copy=True), self._name)
        self._pool.add(self._block)
        return self._block.values

    def _present(self) -> Block:
        assert self._block is not None
        return self._block

    def visit(self, *, write: bool, fresh: bool = False) -> None:
        self._pool.visit(self._present(), write=write, fresh=fresh)

    def fetch(self) -> Tensor:
        block = self._present()
        self._pool.visit(block, write=False)
        values, arrival = self._link.fetch(block.values)
        self._pool.guard(block, arrival)
        self._order.fetched(self)
        arrival.on_stream()
        return values

    def prefetch(self) -> None:
        """Begin to read it. The copy up waits for the fetch: only then is it certain."""
        self.prepare()

    def prepare(self) -> None:
        self._pool.prefetch(self._present())

    def changed(self) -> None:
        self._pool.flush(self._present())

    def close(self) -> None:
        self._order.forget()
        self._pool.remove(self._present())
        self._block = None


# -- gradients -----------------------------------------------------------------------------------------------------


def summed_in(accumulation_dtype: torch.dtype, gradient: torch.dtype) -> torch.dtype:
    """The dtype of sums over micro-batches: double precision is not given up, whatever the plan says of others."""
    return gradient if gradient is torch.float64 else accumulation_dtype


class GradientStorage(Protocol):
    """Keeps the gradients of one buffer; ``settle`` must have been called before what ``add`` gave is read.

    Attributes:
        adds_in_place: what ``add`` gave may be added to where it is, in ``accumulation_dtype``, without being asked.
    """

    adds_in_place: bool

    @property
    def squares(self) -> Tensor | None:
        """fp32 scalar, the squared norm of the gradient; ``None`` where it was not taken."""

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        """Take over ``reduced``, flat and in the dtype of sums, added to ``owned``; the sum, or the one gradient, that
        replaces ``owned``."""

    def settle(self) -> None:
        """Return when the gradient is where ``add`` said."""

    def clear(self) -> None:
        """The gradient was used or dropped."""


class DeviceGradientStorage:
    """Beside the model. The norm of all units is taken in one launch when they are there."""

    adds_in_place = True

    def __init__(self, accumulation_dtype: torch.dtype) -> None:
        self.accumulation_dtype = accumulation_dtype

    @property
    def squares(self) -> Tensor | None:
        return None

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        return reduced if owned is None else owned.to(summed_in(self.accumulation_dtype, owned.dtype)).add_(reduced)

    def settle(self) -> None:
        """Always there."""

    def clear(self) -> None:
        """Nothing is kept."""


class HostGradientStorage:
    """In host memory that stays allocated.

    Args:
        accumulates: several micro-batches a step are expected; others are summed just the same.
        pinned: see ``host_empty``.
        places: places for what comes down that take turns, see ``turn``; 2 where an update may still read the last one.
    """

    adds_in_place = False

    def __init__(
        self,
        link: HostLink,
        worker: Worker,
        accumulation_dtype: torch.dtype,
        *,
        accumulates: bool,
        pinned: bool,
        places: int = 1,
    ) -> None:
        self._squares: Tensor | None = None
        self._link, self._worker = link, worker
        self._accumulation_dtype = accumulation_dtype
        self._accumulates, self._pinned, self._places = accumulates, pinned, places
        self._received: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._turn = 0
        self._arrival: Arrival = DONE
        self._work: Future[Tensor] | None = None

    @property
    def squares(self) -> Tensor | None:
        if self._work is not None:
            self.settle()
        return self._squares

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        self.settle()  # what came last is in the sum: its place is free
        received = self._place(self._received, reduced.numel(), reduced.dtype)
        if owned is None and not self._accumulates:
            self._squares = ops.squared_norm([reduced])
            self._arrival = self._link.down(received, reduced)
            return received
        total = self._place(self._sums, reduced.numel(), summed_in(self._accumulation_dtype, reduced.dtype))
        if owned is not None and owned is not total:  # more micro-batches than were expected, or a user's own gradient
            total.copy_(owned)
        self._squares = None
        arrival = self._link.down(received, reduced)
        self._work = self._worker.submit(_accumulate, total, received, arrival, first=owned is None)
        return total

    def turn(self) -> None:
        """An update has begun with what is here, and may write parameters over it: what comes goes to the next place.
        What is dropped (an overflow, ``zero_grad``) leaves the turn as it is: the other place may be in use."""
        self._turn = (self._turn + 1) % self._places

    def _place(self, places: list[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        while len(places) <= self._turn:
            places.append(host_empty(numel, dtype, pinned=self._pinned))
        return places[self._turn]

    def settle(self) -> None:
        self._arrival.on_host()
        self._arrival = DONE
        if self._work is not None:
            work, self._work = self._work, None
            self._squares = work.result()

    def clear(self) -> None:
        self._squares = None  # what is on its way still lands: the next ``add`` waits for it

    def spare(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Memory, flat and of ``dtype``, for as many 16-bit parameters as there are gradients: the place where these
        came, which an update may overwrite element for element while it reads them; ``None`` where the sizes differ."""
        received = self._received[self._turn] if len(self._received) > self._turn else None
        if received is None or received.numel() != numel or received.dtype.itemsize != dtype.itemsize:
            return None
        return received.view(dtype)


def _accumulate(total: Tensor, received: Tensor, arrival: Arrival, *, first: bool) -> Tensor:
    """The squared norm of the sum."""
    arrival.on_host()
    if first:
        total.copy_(received)
    elif total.dtype is torch.float32:
        # total - (-1) * received in one pass, by all of the rank's threads; torch would make a wide copy first
        ops.sgd_(
            [total], [received], [], [], None,
            lr=-1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=False,
        )  # fmt: skip
    else:
        total.add_(received)
    return ops.squared_norm([total])


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether the shapes, the dtypes or any bit of two tensors do, on any devices.

    By pieces, so that it allocates little on a GPU; False while a graph is captured, which cannot wait for an answer.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if one.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    pairs = zip(*(torch.split(each.detach().flatten().view(bits), 1 << 24) for each in (one, other)), strict=True)
    return any(not torch.equal(a, b.to(a.device)) for a, b in pairs)
