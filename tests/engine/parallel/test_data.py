"""The training_data loader: shards, epochs, lengths, and resuming in the middle, also at another world size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ds_hf.engine.parallel.data import RepeatingLoader, ShardedLoader, build_dataloader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


def batches(loader: ShardedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def one_epoch(count: int, world_size: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    """The batches of each rank."""
    return [
        batches(build_dataloader(Numbers(count), batch_size, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("count", "world_size", "batch_size"), [(24, 2, 3), (25, 2, 3), (10, 4, 3), (3, 4, 2), (7, 1, 2)]
)
def test_ranks_share_an_epoch(count: int, world_size: int, batch_size: int, drop_last: bool) -> None:
    ranks = one_epoch(count, world_size, batch_size, drop_last=drop_last)
    loader = build_dataloader(Numbers(count), batch_size, drop_last=drop_last, world_size=world_size)
    assert {len(rank) for rank in ranks} == {len(loader)}
    assert isinstance(loader, DataLoader)
    share = -(-count // world_size)
    assert len(loader) == (share // batch_size if drop_last else -(-share // batch_size))
    seen = [index for rank in ranks for batch in rank for index in batch]
    if drop_last:
        assert all(len(batch) == batch_size for rank in ranks for batch in rank)
    else:
        assert set(seen) == set(range(count))
        assert len(seen) == share * world_size


def test_each_pass_has_its_own_order() -> None:
    loader = build_dataloader(Numbers(50), 5)
    passes = [batches(loader) for _ in range(3)]
    assert loader.epoch == 3
    flat = [[index for batch in epoch for index in batch] for epoch in passes]
    assert all(sorted(order) == list(range(50)) for order in flat)
    assert flat[0] != flat[1] != flat[2] != flat[0]
    again = build_dataloader(Numbers(50), 5)
    assert [batches(again) for _ in range(3)] == passes
    assert batches(build_dataloader(Numbers(50), 5, seed=100)) not in passes


def test_a_pass_left_early_is_followed_by_the_next_epoch() -> None:
    loader, reference = (build_dataloader(Numbers(20), 5) for _ in range(2))
    _, second = batches(reference), batches(reference)
    next(iter(loader))
    assert batches(loader) == second
    assert loader.epoch == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("stop", "num_workers"), [(0, 0), (1, 0), (3, 0), (4, 0), (5, 0), (7, 0), (8, 0), (3, 2), (4, 2)]
)
def test_resumes_where_it_stood(stop: int, num_workers: int) -> None:
    reference = RepeatingLoader(build_dataloader(Numbers(19), 5))
    whole = [next(reference).tolist() for _ in range(12)]
    first = build_dataloader(Numbers(19), 5, num_workers=num_workers)
    endless = RepeatingLoader(first)
    start = [next(endless).tolist() for _ in range(stop)]
    state = first.state_dict()
    second = build_dataloader(Numbers(19), 5, seed=77, num_workers=num_workers)
    second.load_state_dict(state)
    endless = RepeatingLoader(second)
    assert start + [next(endless).tolist() for _ in range(12 - stop)] == whole


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next(drop_last: bool) -> None:
    first = build_dataloader(Numbers(19), 5, drop_last=drop_last)
    iterator = iter(first)
    for _ in range(len(first)):
        next(iterator)
    second = build_dataloader(Numbers(19), 5, drop_last=drop_last)
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert len(batches(second)) == len(second)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 4)])
def test_resumes_at_another_world_size(before: int, after: int) -> None:
    """Three steps of a global batch of 8, then the rest: no sample of the epoch is lost or seen twice."""
    seen: list[int] = []
    states = []
    for rank in range(before):
        loader = build_dataloader(Numbers(64), 8 // before, rank=rank, world_size=before)
        iterator = iter(loader)
        for _ in range(3):
            seen += next(iterator).tolist()
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        loader = build_dataloader(Numbers(64), 8 // after, rank=rank, world_size=after)
        loader.load_state_dict(states[0])
        rest = batches(loader)
        assert len(rest) == 5
        seen += [index for batch in rest for index in batch]
    assert sorted(seen) == list(range(64))


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches(build_dataloader(Numbers(9), 2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "world_size"), [(12, 3), (13, 3), (14, 3), (2, 4)])
def test_streams_are_cut_by_rank_evenly(count: int, world_size: int, drop_last: bool) -> None:
    ranks = [
        batches(build_dataloader(SizedStream(count), 2, drop_last=drop_last, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) == len(build_dataloader(SizedStream(count), 2, drop_last=drop_last, world_size=world_size))
    seen = sorted(item for rank in ranks for batch in rank for item in batch)
    if drop_last:
        assert len(set(seen)) == len(seen)
    else:
        assert set(seen) == set(range(count))
        assert len(seen) == -(-count // world_size) * world_size


def test_streams_resume_and_hear_of_epochs() -> None:
    first = build_dataloader(Stream(20), 3, rank=1, world_size=2)
    whole = batches(first)
    iterator = iter(first)
    start = [next(iterator).tolist() for _ in range(2)]
    stream = Stream(20)
    second = build_dataloader(stream, 3, rank=1, world_size=2)
    second.load_state_dict(first.state_dict())
    assert start + batches(second) == whole
    assert stream.epochs == [1]
    with pytest.raises(TypeError):
        len(second)


def test_collate_function_is_used() -> None:
    loader = build_dataloader(Numbers(4), 2, collate_fn=sum)
    assert sum(loader) == 6


def test_unusable_datasets() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ValueError, match="Endless has no __len__"):
        build_dataloader(Endless(), 2)
    with pytest.raises(ValueError, match="empty"):
        build_dataloader(Numbers(0), 2)


def test_repeating_loader_restarts() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert iter(loader) is loader
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
