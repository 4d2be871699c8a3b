"""Ranks acting as one: what one rank knows is shared, what one rank suffers is raised by all.

Invariant: between two exchanges no rank issues another collective, so a rank that fails never leaves the others
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ds_hf.engine.comm.mesh import Axis
from ds_hf.errors import CheckpointError

__all__ = ["Meeting", "collect", "share", "together"]

T = TypeVar("T")


def collect(axis: Axis, value: T) -> list[T]:
    """Every rank's ``value``, by rank."""
    if axis.world_size == 1:
        return [value]
    values: list[T | None] = [None] * axis.world_size
    with axis.log("all-gather", "what each rank has to say about a checkpoint"):
        dist.all_gather_object(values, value, group=axis.group)
    return values  # type: ignore[return-value]


def share(axis: Axis, value: T) -> T:
    """Rank 0's ``value``."""
    if axis.world_size == 1:
        return value
    holder = [value]
    with axis.log("broadcast", "what rank 0 has to say about a checkpoint"):
        dist.broadcast_object_list(holder, axis.global_rank(0), group=axis.group)
    return holder[0]


class Meeting:
    """What the ranks bring to the end of a block.

    Attributes:
        brought: what each rank did, by rank; known after the block.
    """

    def __init__(self) -> None:
        self.own: Any = None
        self.brought: list[Any] = []

    def bring(self, value: Any) -> None:
        """Show it to all ranks."""
        self.own = value


@contextmanager
def together(axis: Axis, doing: str) -> Iterator[Meeting]:
    """Run the block on all ranks and meet at its end; when it failed anywhere, it fails everywhere.

    Raises:
        CheckpointError: this rank's own failure, or the first other rank's.
    """
    failure: Exception | None = None
    meeting = Meeting()
    try:
        yield meeting
    except Exception as error:  # everything: a rank that left alone would leave the others waiting
        failure = error
    report = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = collect(axis, (report, meeting.own))
    reports = [answer[0] for answer in answers]
    meeting.brought = [answer[1] for answer in answers]
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"{doing} failed: {report}") from failure
    for rank, other in enumerate(reports):
        if other is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {other.removeprefix('CheckpointError: ')}")
