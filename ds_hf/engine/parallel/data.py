"""The loader behind ``initialize(training_data=...)``: torch's DataLoader, which here shards, reshuffles and resumes.

Every pass over the loader is an epoch with its own order, the same on all ranks; rank r takes every ``world_size``-th
sample, and all ranks see equally many batches (the last ones repeat samples if they must), since a rank that ran out
alone would hang the others. The state counts samples of all ranks, so a run may resume at another world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ds_hf.engine.comm.mesh import Mesh

__all__ = ["RepeatingLoader", "ShardedLoader", "build_dataloader", "dealt_to_data"]

Loader = TypeVar("Loader", bound=DataLoader[Any])


class RepeatingLoader:
    """Iterates over ``loader`` for ever, starting it again whenever it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.same_in_sequence = getattr(loader, "same_in_sequence", False)  # see ``dealt_to_data``
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class ShardedLoader(DataLoader[Any]):
    """One rank's share of a dataset; ``iter()`` starts the next epoch, or goes on where a loaded state stood.

    Attributes:
        epoch: the pass that is running or comes next.
        seed: with ``epoch`` it decides the order.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: _ResumableSampler | None,
        *,
        batch_size: int,
        world_size: int,
        seed: int,
        **options: Any,
    ) -> None:
        # An own generator: torch would otherwise draw the workers' seed from the global one, and change the run.
        super().__init__(dataset, batch_size, sampler=sampler, generator=torch.Generator(), **options)
        self.epoch = 0
        self.seed = seed
        self._world_size = world_size
        self._taken = 0  # samples of this epoch that this rank has handed out
        self._resuming = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._taken and not self._resuming:
            self._next_epoch()  # the last pass was left early
        self._resuming = False
        skipped = self._begin(self._taken)
        for batch in islice(super().__iter__(), skipped, None):
            self._taken += self._batch_numel
            yield batch
        self._next_epoch()

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the samples of it that all ranks together have taken."""
        return {"epoch": self.epoch, "samples": self._taken * self._world_size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next ``iter()`` continue where ``state`` was taken."""
        self.epoch = state["epoch"]
        self.seed = state["seed"]
        self._taken = state["samples"] // self._world_size
        self._resuming = True
        if isinstance(self.sampler, _ResumableSampler) and self._taken >= self._epoch_numel(self.sampler):
            self._next_epoch()

    @property
    def _batch_numel(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

    def _epoch_numel(self, sampler: _ResumableSampler) -> int:
        """Samples that one pass hands out."""
        whole = len(sampler)
        return whole - whole % self._batch_numel if self.drop_last else whole

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._taken = 0

    def _begin(self, taken: int) -> int:
        """Set up the pass; returns how many batches must still be thrown away to stand after ``taken`` samples."""
        self.generator.manual_seed(self.seed + self.epoch)
        if isinstance(self.sampler, _ResumableSampler):
            self.sampler.seed = self.seed
            self.sampler.set_epoch(self.epoch)
            self.sampler.start = taken
            return 0
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return taken // self._batch_numel


def build_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    seed: int = 0,
    *,
    shuffles: bool = True,
) -> ShardedLoader:
    """A loader of this rank's batches of ``batch_size`` samples (the micro-batch) from ``dataset``.

    An iterable dataset is cut by rank as it streams; with ``num_workers`` it must, as in plain torch, share itself out
    among the workers.

    Args:
        shuffles: a dataset with a length is read in another order in each epoch.
    """
    sampler: _ResumableSampler | None = None
    if isinstance(dataset, IterableDataset):
        dataset = _RankShard(dataset, rank, world_size, drop_last)
    else:
        if not hasattr(dataset, "__len__"):
            name = type(dataset).__name__
            raise ValueError(f"training_data: {name} has no __len__; add it, or make it a torch IterableDataset")
        if not len(dataset):
            raise ValueError("training_data: the dataset is empty")
        sampler = _ResumableSampler(dataset, world_size, rank, shuffle=shuffles, seed=seed)
    return ShardedLoader(
        dataset,
        sampler,
        batch_size=batch_size,
        world_size=world_size,
        seed=seed,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
    )


class _ResumableSampler(DistributedSampler[Any]):
    """torch's sampler, which can leave out the first ``start`` samples of this rank."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.start, None)


class _RankShard(IterableDataset[Any]):
    """Every ``world_size``-th item of a stream, equally many on every rank."""

    def __init__(self, stream: IterableDataset[Any], rank: int, world_size: int, drop_last: bool) -> None:
        self.stream = stream
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.stream)
        first: list[Any] = []
        while row := list(islice(items, self.world_size)):
            first = first or row
            if len(row) < self.world_size:
                if self.drop_last:
                    return
                row += islice(cycle(first), self.world_size - len(row))
            yield row[self.rank]

    def __len__(self) -> int:
        numel = len(self.stream)  # type: ignore[arg-type]  # TypeError without a length, as torch expects
        return numel // self.world_size if self.drop_last else -(-numel // self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, if it reshuffles (Hugging Face datasets do)."""
        inner = getattr(self.stream, "set_epoch", None)
        if inner is not None:
            inner(epoch)


def dealt_to_data(loader: Loader, mesh: Mesh) -> Loader:
    """``loader``, which gives processes that share samples the same batches; where they divide sequences it says so
    (``same_in_sequence``), as what divides them expects other batches of each."""
    loader.same_in_sequence = mesh.shape.sequence > 1
    return loader
