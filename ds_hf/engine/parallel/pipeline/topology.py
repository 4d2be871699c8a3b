"""Which process has which coordinates: DeepSpeed's topologies, without any process group.

Ranks are numbered row-major: the last axis varies fastest.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology", "prime_factors"]


class ProcessTopology:
    """Ranks by their coordinates along named axes.

    Attributes:
        axes: names, from the outermost to the innermost, as valid Python identifiers.
        dims: number of processes along each.
        ProcessCoord: the named tuple of coordinates.
        mapping: coordinates -> rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or any(size < 1 for size in dims):
            raise ValueError(f"axes {list(axes)} with sizes {list(dims)}: give each axis a size of at least 1")
        self.axes = axes
        self.dims = dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places: Any = itertools.product(*(range(size) for size in dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at one place; every axis has to be given.

        Raises:
            ValueError: an axis is missing, or there is no such place.
        """
        if len(coord_kwargs) != len(self.axes):
            raise ValueError("get_rank() takes a coordinate for each axis; filter_match() finds several ranks")
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ValueError(f"there is no rank at {coord_kwargs}: the sizes are {list(self.dims)}")
        return self.mapping[place]

    def get_axis_names(self) -> Sequence[str]:
        """Names of the axes in order."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Coordinates of ``rank`` as text, such as ``model_01``."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in set(omit_axes)]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Number of processes along ``axis``, 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of ``rank``.

        Raises:
            ValueError: there is no such rank.
        """
        for coord, found in self.mapping.items():
            if found == rank:
                return coord
        raise ValueError(f"rank {rank} is not in this topology of {len(self.mapping)} processes")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists of ranks that differ along ``axis`` alone; none for an axis that is not there."""
        if axis not in self.axes:
            return []
        place = self.axes.index(axis)
        found: dict[tuple[int, ...], list[int]] = {}
        for coord, rank in self.mapping.items():
            found.setdefault((*coord[:place], *coord[place + 1 :]), []).append(rank)
        return list(found.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks that have these coordinates."""
        wanted = filter_kwargs.items()
        return [rank for coord, rank in self.mapping.items() if all(getattr(coord, axis) == at for axis, at in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks at ``idx`` along ``axis``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of processes."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallelism: the processes of a stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model (tensor) parallelism: those that share layers are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def prime_factors(number: int) -> list[int]:
    """Prime factors in ascending order.

    Raises:
        ValueError: the number is not positive.
    """
    if number <= 0:
        raise ValueError(f"{number} has no prime factors: give a positive number")
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found
