"""A second, larger shard of parameters, from which neighbours gather them (hpZ of ZeRO++, arXiv:2306.10209).

The first shard is what it is at stage 3 without: one of all replicas, of which the optimizer writes the values. The
second is this process's part of what its neighbours divide, the first shards of as many processes as there are groups
of neighbours. It is filled anew when the first was written, by one exchange among all replicas. So gradients, optimizer
states, norms and checkpoints are those of stage 3 to the bit, and a gather stays inside a host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.block_collectives import spread_blocks
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import Awaited, CommStream, wait
from ds_hf.engine.ops.blocks import BlockFormat
from ds_hf.engine.zero.storage import DeviceShardStorage, ShardStorage

__all__ = ["SecondShard"]


class SecondShard:
    """Keeps both shards of one buffer, as a ``ShardStorage`` whose ``fetch`` gives the second one.

    ``keep`` and ``changed`` are collective over ``axis``.

    Args:
        second: where the second shard is kept.
        axis: over which the first shards are numbered; inner: neighbours on it that gather from each other.
        device: where the model computes.
        comm_stream: that of gathers.
        label: of the buffer, in the log of collectives.
        form: of what is exchanged between the first and the second shards, which then are rounded; default exact.
    """

    def __init__(
        self,
        second: ShardStorage,
        axis: Axis,
        inner: Axis,
        *,
        device: torch.device,
        comm_stream: CommStream,
        label: str,
        form: BlockFormat | None = None,
    ) -> None:
        self.apart = second.apart
        self.stays = True
        self._storage, self._axis, self._inner = second, axis, inner
        self._first_storage = DeviceShardStorage(device, torch.device("cpu") if second.apart else device)
        self._device, self._comm_stream = device, comm_stream
        self._what, self._form = f"the weights of {label}", form
        self._first: Tensor | None = None
        self._second: Tensor | None = None
        self._read: Awaited | None = None  # the first shard, by the exchange

    def keep(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy of ``values``, the first shard, ``[shard_numel]`` in the parameters' dtype."""
        self._first = self._first_storage.keep(values, into)
        self._second = self._storage.keep(self._exchanged())
        return self._first

    def visit(self, *, write: bool, fresh: bool = False) -> None:
        """The first shard is always there; what still reads it is waited for before it is written."""
        if write:
            wait(self._read)
            self._read = None

    def fetch(self) -> Tensor:
        """The second shard on the device, ``[shard_numel * groups]`` in the parameters' dtype."""
        return self._storage.fetch()

    def fetch_first(self) -> Tensor:
        """The first shard on the device, ``[shard_numel]`` in the parameters' dtype, as the optimizer wrote it."""
        return self._first_storage.fetch()

    @property
    def values(self) -> Tensor:
        """The second shard where it is kept, ``[shard_numel * groups]`` in the parameters' dtype."""
        assert self._second is not None
        wait(self._read)
        return self._second

    def changed(self) -> None:
        """The first shard was written to: the second follows, on the stream."""
        assert self._second is not None
        with self._comm_stream:
            if self.apart:
                values = self._exchanged()
                self._storage.visit(write=True, fresh=True)
                self._second.copy_(values)
            else:
                self._exchanged(self._second)
            self._read = self._comm_stream.event()
        self._storage.changed()

    def close(self) -> None:
        self._storage.close()
        self._first_storage.close()
        self._first = self._second = None

    def _exchanged(self, second: Tensor | None = None) -> Tensor:
        """The second shard as it is now, on the device; by default a new one."""
        first = self._first_storage.fetch()
        if second is None:
            groups = self._axis.world_size // self._inner.world_size
            second = torch.empty(first.numel() * groups, dtype=first.dtype, device=self._device)
        if self._form is None:
            collectives.spread(second, first, self._axis, self._inner, self._what)
        else:
            spread_blocks(second, first, self._axis, self._inner, self._form, self._what)
        return second
