"""The script's own batch at other sizes, and the longest batch of its data set.

A batch is what the script passes to the engine: ``(args, kwargs)``. Every tensor whose first dim is the batch's size
is resized; samples are repeated in turn where more are wanted than there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["Batch", "LoaderWatch", "batch_numel", "inputs_of", "longest_batch", "map_tensors", "resized", "shapes_of",
           "tensors_in"]  # fmt: skip

SCAN_SECONDS = 5.0  # for the lengths of the data set's samples


@dataclass(frozen=True)
class Batch:
    """What the engine was called with; ``numel`` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numel: int


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in its lists, tuples and mappings replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        try:
            return type(value)(changed)  # type: ignore[call-arg]  # BatchEncoding and the like
        except TypeError:
            return changed
    return value


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(values, note)
    return found


def batch_numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Samples in a batch: the first dim of its first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors_in(*args, kwargs) if tensor.dim() > 0), None)


def resized(batch: Batch, numel: int, of: int | None = None) -> Batch:
    """``batch`` with ``numel`` samples, by repeating its first ``of`` (default: all)."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != batch.numel:
            return tensor
        rows = torch.arange(numel, device=tensor.device) % (of or batch.numel)
        return tensor.detach().index_select(0, rows)

    return Batch(map_tensors(batch.args, change), map_tensors(dict(batch.kwargs), change), numel)


def shapes_of(batch: Batch) -> dict[str, list[int]]:
    """Shape of each tensor by its name in the call."""
    shapes: dict[str, list[int]] = {}
    for name, value in [*((str(index), arg) for index, arg in enumerate(batch.args)), *batch.kwargs.items()]:

        def note(tensor: Tensor, name: str = name) -> Tensor:
            shapes.setdefault(name, list(tensor.shape))
            return tensor

        map_tensors(value, note)
    return shapes


def inputs_of(batch: Batch) -> dict[str, tuple[list[int], str]] | None:
    """Shape and dtype of each tensor in the call by its name; ``None`` where they are not all passed by name."""
    values = batch.kwargs.values()
    if batch.args or not all(isinstance(value, Tensor) or value is None for value in values):
        return None
    tensors = {name: value for name, value in batch.kwargs.items() if value is not None}
    return {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in tensors.items()}


class LoaderWatch:
    """Remembers which ``DataLoader`` was iterated over last: at the first training forward that is the training one.
    And how long was waited for batches.

    There is no other way to the data set that works for every script; the classes get their methods back with
    ``remove``.

    Attributes:
        waited: seconds in ``next`` of any loader, so far.
    """

    def __init__(self) -> None:
        self.loader: DataLoader[Any] | None = None
        self.waited = 0.0
        original = self._original = DataLoader.__iter__
        watch = self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            watch.loader = loader
            return original(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign, assignment]
        advance = self._advance = _BaseDataLoaderIter.__next__

        def timed(iterator: _BaseDataLoaderIter) -> Any:
            start = time.perf_counter()
            try:
                return advance(iterator)
            finally:
                watch.waited += time.perf_counter() - start

        _BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Stop watching."""
        DataLoader.__iter__ = self._original  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = self._advance  # type: ignore[method-assign]


def longest_batch(loader: DataLoader[Any] | None, like: Batch, numel: int) -> Batch | str:
    """A batch in the form of ``like`` made of the ``numel`` longest samples of the loader's data set.

    Returns:
        the batch, or why there is none.
    """
    dataset = getattr(loader, "dataset", None)
    if loader is None or dataset is None:
        return "the script feeds the engine without a torch DataLoader"
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        return "the data set is a stream"
    lengths, seen = _lengths(dataset)
    if not lengths:
        return "the data set's samples have no length"
    if min(lengths.values()) == max(lengths.values()):
        return "all samples have the same length" if seen == len(dataset) else f"the first {seen} samples are alike"
    order = sorted(lengths, key=lambda index: -lengths[index])[:numel]
    samples = [dataset[index] for index in (order * (numel // len(order) + 1))[:numel]]
    return _in_form(loader.collate_fn(samples), like, numel)


def _lengths(dataset: Any) -> tuple[dict[int, int], int]:
    """Length of each sample that could be looked at in time."""
    lengths: dict[int, int] = {}
    end = time.monotonic() + SCAN_SECONDS
    for index in range(len(dataset)):
        if time.monotonic() > end:
            break
        length = _length(dataset[index])
        if length is None:
            return {}, index
        lengths[index] = length
    return lengths, len(lengths)


def _length(sample: Any) -> int | None:
    """Elements of a sample's members that have a length, together; ``None`` when none has."""
    values = (
        sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, list | tuple) else [sample]
    )
    found = [len(value) for value in values if isinstance(value, Sized) and not _is_single(value)]
    return sum(found) if found else None


def _is_single(value: Any) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, Tensor) and value.dim() == 0)


def _in_form(collated: Any, like: Batch, numel: int) -> Batch | str:
    """``collated`` passed as the script passes its batches."""
    device = next(iter(_devices(like)), torch.device("cpu"))
    collated = map_tensors(collated, lambda tensor: tensor.to(device))
    if isinstance(collated, Mapping) and like.kwargs and not like.args and set(collated) & set(like.kwargs):
        kept = {key: collated.get(key, value) for key, value in like.kwargs.items()}
        return Batch((), kept, numel)
    if isinstance(collated, list | tuple) and len(collated) == len(like.args) and not like.kwargs:
        return Batch(tuple(collated), {}, numel)
    if len(like.args) == 1 and not like.kwargs and type(collated) is type(like.args[0]):
        return Batch((collated,), {}, numel)
    return "the script changes what its DataLoader gives before it calls the engine"


def _devices(batch: Batch) -> list[torch.device]:
    return [tensor.device for tensor in tensors_in(*batch.args, batch.kwargs)]
