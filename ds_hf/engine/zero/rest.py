"""Where the shard of a sharded flat buffer rests between uses, and how it comes to the device before a gather.

A rest never communicates: shards come up early in an order that each process learns by itself, from the gathers of the
step before, and a wrong guess costs a copy and no more.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.link import Arrival, Link
from ds_hf.engine.offload.memory import host_copy
from ds_hf.engine.offload.swap import SwapPool

__all__ = ["DeviceRest", "FileRest", "HostRest", "Order", "ShardRest"]


class ShardRest(Protocol):
    """Keeps the shard of one buffer.

    Attributes:
        apart: the shard never is a part of the gathered parameters.
        stays: it is in memory all the time.
    """

    apart: bool
    stays: bool

    def keep(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy of ``values``, ``[shard_numel]``, where shards rest; ``into`` memory that is there already."""

    def visit(self, *, write: bool, fresh: bool = False) -> None:
        """Return when the tensor that ``keep`` gave may be used; until something else is visited.

        Args:
            write: it will be written to, and ``changed`` be called.
            fresh: all of it will be: its values need not be there.
        """

    def fetch(self) -> Tensor:
        """The values on the device, for what the current stream enqueues next."""

    def changed(self) -> None:
        """The shard was written to: what was fetched ahead is stale."""


class DeviceRest:
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


class Follower(Protocol):
    """A shard that can come up before it is asked for."""

    def prefetch(self) -> None:
        """It is probably next."""

    def prepare(self) -> None:
        """It comes soon after the next."""


class Order:
    """Which shard is fetched after which: guessed from what followed the same two fetches the last time.

    Two tell forward from backward, where the units come the other way round.

    Args:
        depth: how many fetches are looked ahead.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._after: dict[tuple[Follower | None, Follower], Follower] = {}
        self._last: tuple[Follower | None, Follower] | None = None

    def fetched(self, rest: Follower) -> None:
        """Note that ``rest`` is fetched now, and begin with what probably comes next."""
        before = None
        if self._last is not None:
            self._after[self._last] = rest
            before = self._last[1]
        place = self._last = (before, rest)
        for step in range(self._depth):
            following = self._after.get(place)
            if following is None or following is rest:
                return
            if step == 0:
                following.prefetch()
            else:
                following.prepare()
            place = (place[1], following)


class HostRest:
    """In host memory; the shard that comes next is copied up while the device computes.

    Args:
        order: shared by all shards of an engine.
        pinned: see ``host_empty``.
    """

    apart = stays = True

    def __init__(self, link: Link, order: Order, *, pinned: bool) -> None:
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


class FileRest:
    """In a file; the shards that come next are read while the device computes, and then copied up.

    Args:
        pool: of all shards of an engine that rest in files.
        order: shared by all shards of an engine.
        name: of the file.
    """

    apart, stays = True, False

    def __init__(self, pool: SwapPool, link: Link, order: Order, name: str) -> None:
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
