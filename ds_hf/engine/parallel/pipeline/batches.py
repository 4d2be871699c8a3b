"""The data of one batch: all stages agree on how many micro-batches there are before any of them begins."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.errors import PipelineError

__all__ = ["pull"]


def pull(
    iterator: Iterator[Any] | None,
    count: int,
    batch_fn: Callable[[Any], Any] | None,
    mesh: Mesh,
    device: torch.device,
    *,
    reads: bool,
    compare: bool,
    which: Callable[[], Any] | None = None,
) -> list[Any]:
    """The next ``count`` items, on the stages that read data. Collective over all processes.

    Args:
        iterator: of this process; ``None`` where a ``batch_fn`` alone gives its items.
        reads: this stage does.
        compare: check that the first and the last stage of each pipeline have the same items.
        which: says which items came last, for iterators that know; otherwise values are compared.

    Raises:
        StopIteration: a process has fewer left, on all processes alike.
        PipelineError: a stage that reads data has none, or other items than the other one; on all processes alike.
    """
    items: list[Any] = []
    missing = reads and iterator is None and batch_fn is None
    if reads and not missing:
        for _ in range(count):
            try:
                item = None if iterator is None else next(iterator)
            except StopIteration:
                break
            items.append(item if batch_fn is None else batch_fn(item))
    found = [-1 if missing else len(items) if reads else count]
    sums = [0, 0]
    if compare and reads and len(items) == count:
        sums = [_checksum(items if which is None else which()), 1]
    least = _least(torch.tensor(found, device=device), mesh)
    if least < 0:
        raise PipelineError(
            "a stage that reads data was given none: call train_batch(data_iter=...) with an iterator on the first and "
            "the last stage, or set_dataiterator(), or initialize(training_data=...)"
        )
    if least < count:
        raise StopIteration(
            f"the data end after {least} of {count} micro-batches of this step on one process: none of them is trained"
        )
    if compare and mesh.shape.pipe > 1:
        _compare(sums, mesh, device)
    return items


def _least(value: Tensor, mesh: Mesh) -> int:
    return -int(collectives.all_reduce_max(-value, mesh.world, "how many micro-batches there are"))


def _compare(sums: list[int], mesh: Mesh, device: torch.device) -> None:
    total, there = sums
    extremes = torch.tensor([total if there else -1, -total if there else -(2**33)], device=device)
    largest, smallest = collectives.all_reduce_max(extremes, mesh.axis("pipe"), "what the stages read").tolist()
    differs = torch.tensor([int(largest != -smallest)], device=device)
    if int(collectives.all_reduce_max(differs, mesh.world, "whether the stages read the same")):
        raise PipelineError(
            "the first stage and the last one read different items, so inputs would meet labels of other samples: give "
            "both the same data in the same order (the same seed, sampler and shard: deepspeed_io() and "
            'initialize(training_data=...) do). Where it is meant so, set "ds_hf": {"pipeline": {"check_batches": '
            "false}}"
        )


def _checksum(value: Any, before: int = 0) -> int:
    """Of the values of all tensors and numbers in a nest."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return zlib.crc32(
            flat.numpy().tobytes() if value.numel() else b"", zlib.crc32(str(value.shape).encode(), before)
        )
    if isinstance(value, Mapping):
        value = [item for pair in sorted(value.items(), key=lambda pair: str(pair[0])) for item in pair]
    if isinstance(value, tuple | list):
        for item in value:
            before = _checksum(item, before)
        return before
    return zlib.crc32(repr(value).encode(), before) if isinstance(value, int | float | str | bool) else before
