"""``PartitionedTensor``: a tensor of which each process of a group keeps a part."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.parallel.pipeline.partition import partition_uniform

__all__ = ["PartitionedTensor"]


class PartitionedTensor:
    """The elements of a tensor, in order, divided over the processes of ``group``; the first parts may be one longer.

    Args:
        tensor: the same on all processes of the group; its values are copied.
        group: process group, ``None`` for all processes.

    Attributes:
        num_parts, rank: of the group. orig_size, orig_device: of the tensor.
        local_data: this process's part, [local]. partition: where the parts start, and the end.
        even_split: whether all parts are equally long.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Tensor | None = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.local_data, self.partition = self._partition_tensor(tensor)
        self.even_split = tensor.numel() % self.num_parts == 0

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """The tensor whose ``to_meta()`` is ``meta``, of the part that this process has.

        Args:
            device: where ``full()`` lies, default that of the part.

        Raises:
            ValueError: ``meta`` is none, or speaks of another group or another part.
        """
        found = cls.__new__(cls)
        found.group, found.local_data = group, local_part
        found.orig_device = local_part.device if device is None else torch.device(device)
        dims, *rest = meta.tolist() or [0]
        found.orig_size, rest = rest[:dims], rest[dims:]
        if len(rest) < 2 or len(rest) != rest[0] + 3:
            raise ValueError(f"not what to_meta() gives: {meta.tolist()!r:.120}")
        found.num_parts, found.rank, found.partition = rest[0], rest[1], rest[2:]
        here = (dist.get_world_size(group), dist.get_rank(group))
        if here != (found.num_parts, found.rank):
            raise ValueError(
                f"part {found.rank} of {found.num_parts} is not that of process {here[1]} of the {here[0]} "
                "in this group: give from_meta() the group of the PartitionedTensor"
            )
        wanted = found.partition[found.rank + 1] - found.partition[found.rank]
        if local_part.numel() != wanted:
            raise ValueError(f"local_part has {local_part.numel()} elements, and the part that meta describes {wanted}")
        found.even_split = found.partition[-1] % found.num_parts == 0
        return found

    def _partition_tensor(self, tensor: Tensor) -> tuple[Tensor, list[int]]:
        partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = partition[self.rank : self.rank + 2]
        return tensor.detach().reshape(-1)[start:stop].clone(), partition

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor. Collective.

        Args:
            device: default that of the tensor it was made of.
        """
        sizes = [stop - start for start, stop in itertools.pairwise(self.partition)]
        own = self.local_data.new_zeros(max(sizes))
        own[: self.local_data.numel()] = self.local_data.reshape(-1)
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=self.group)
        gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return gathered.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        """What ``from_meta`` needs besides the part: dimensions, sizes, parts, rank, partition, int64."""
        meta = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(meta, dtype=torch.int64, device=self.orig_device)

    def data(self) -> Tensor:
        """This process's part, [local]."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Of this process's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Of the whole tensor."""
        return self.orig_size

    def __repr__(self) -> str:
        kept = f"{self.local_data.numel()} of {math.prod(self.orig_size)} elements"
        return f"PartitionedTensor({self.orig_size}, part {self.rank} of {self.num_parts}: {kept})"
