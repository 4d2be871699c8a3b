"""How the values of all ranks come into a buffer: by a collective, by copies from the other ranks' memory, or rounded.

``FlatBuffer`` says when, and on which stream; ``parts`` chooses which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.block_collectives import all_gather_blocks
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.peers import Peers, Region
from ds_hf.engine.ops.blocks import BlockFormat

__all__ = ["CopiedGathering", "Gathering", "RoundedGathering"]


class Gathering:
    """By a collective.

    Args:
        over: the processes whose shards, as the buffer's storage gives them, are the whole values.

    Attributes:
        exact: what was gathered last is what the optimizer wrote; ``rounds``: it may be otherwise.
        peers: the ranks that read each other's memory for it; ``region``: this memory, once there are values.
    """

    exact = True
    rounds = False
    peers: Peers | None = None
    region: Region | None = None

    def __init__(self, over: Axis) -> None:
        self.over = over

    def place(self, numel: int, dtype: torch.dtype, *, visible: bool = False) -> Tensor | None:
        """Memory ``[numel]`` of ``dtype`` where this rank's values have to lie, ``None`` where any will do. Collective.

        Args:
            visible: users may write to it.
        """
        return None

    def aim(self, full: Tensor, ranges: Sequence[slice], *, sharded: bool) -> None:
        """Values go to ``full`` (``[numel]``, the parameters' dtype) from now on, each rank's to its range."""

    def fill(self, full: Tensor, shard: Callable[[], Tensor], what: str, *, exact: bool = False) -> None:
        """Gather the values of all ranks into ``full`` (``[numel]``, the parameters' dtype), on the current stream.
        Collective.

        Args:
            shard: gives this rank's, ``[shard_numel]``, on the device.
            exact: as the optimizer wrote them, not as the model computes with them.
        """
        collectives.all_gather(full, shard(), self.over, what)


class CopiedGathering(Gathering):
    """By copies from the memory of ``peers``."""

    def __init__(self, over: Axis, peers: Peers) -> None:
        super().__init__(over)
        self.peers = peers
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])

    def place(self, numel: int, dtype: torch.dtype, *, visible: bool = False) -> Tensor:
        assert self.peers is not None
        self.region = self.peers.region(numel, dtype, visible=visible)
        return self.region.mine

    def aim(self, full: Tensor, ranges: Sequence[slice], *, sharded: bool) -> None:
        if self.region is not None:
            theirs = self.region.theirs
            sources = list(theirs) if sharded else [t[range_] for t, range_ in zip(theirs, ranges, strict=True)]
            self._copies = [full[range_] for range_ in ranges], sources

    def fill(self, full: Tensor, shard: Callable[[], Tensor], what: str, *, exact: bool = False) -> None:
        if self.region is None:  # of a single process
            super().fill(full, shard, what)
        else:
            self.region.gather(*self._copies, what)


class RoundedGathering(Gathering):
    """Of a sharded buffer whose weights travel rounded (qwZ of ZeRO++).

    Args:
        form: the blocks in which shards are gathered; ``None`` where shards between uses are rounded already.
        exact_shard: gives the exact shard, on the device ...
        exact_over: ... and the processes whose exact shards are the whole.
    """

    rounds = True

    def __init__(
        self, over: Axis, form: BlockFormat | None, exact_shard: Callable[[], Tensor], exact_over: Axis
    ) -> None:
        super().__init__(over)
        self._form, self._exact_shard, self._exact_over = form, exact_shard, exact_over

    def fill(self, full: Tensor, shard: Callable[[], Tensor], what: str, *, exact: bool = False) -> None:
        self.exact = exact
        if exact:
            collectives.all_gather(full, self._exact_shard(), self._exact_over, what)
        elif self._form is not None:
            all_gather_blocks(full, shard(), self.over, self._form, what)
        else:
            super().fill(full, shard, what)
