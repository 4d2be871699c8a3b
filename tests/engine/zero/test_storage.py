"""What every storage of shards and every storage of gradients does, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_hf.engine.offload.aio import Aio
from ds_hf.engine.offload.folder import SwapFolder
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.zero.storage import (
    DeviceGradientStorage,
    DeviceShardStorage,
    FetchOrder,
    FileShardStorage,
    GradientStorage,
    HostGradientStorage,
    HostShardStorage,
    ShardStorage,
)

CPU = torch.device("cpu")
N = 3000

# -- shards -----------------------------------------------------------------------------------------------------------

MakeShards = Callable[[int], list[ShardStorage]]


@pytest.fixture(params=["device", "host", "file"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeShards]:
    """A function that makes so many storages of one engine."""
    link, order, pools = HostLink(CPU), FetchOrder(depth=2), []

    def make(count: int) -> list[ShardStorage]:
        if request.param == "device":
            return [DeviceShardStorage(CPU, CPU) for _ in range(count)]
        if request.param == "host":
            return [HostShardStorage(link, order, pinned=False) for _ in range(count)]
        pools.append(SwapPool(SwapFolder(tmp_path), Aio(block=8192, depth=2), 3, pinned=False))
        return [FileShardStorage(pools[0], link, order, f"shard {index}") for index in range(count)]

    yield make
    for pool in pools:
        pool.close()
    link.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_a_copy_and_comes_back_as_it_was(shards: MakeShards, dtype: torch.dtype) -> None:
    (storage,) = shards(1)
    values = torch.randn(N).to(dtype)
    kept = storage.keep(values)
    expected = values.clone()
    values.zero_()
    assert (kept.shape, kept.dtype) == (expected.shape, dtype)
    for _ in range(3):
        assert torch.equal(storage.fetch(), expected)
    storage.visit(write=False)
    assert torch.equal(kept, expected)


def test_what_was_written_is_what_is_fetched_in_any_order(shards: MakeShards) -> None:
    """Seven shards, more than the slots of files; fetched in turn, as units are, and out of turn; changed between."""
    storages = shards(7)
    kept = [storage.keep(torch.full((N,), float(index))) for index, storage in enumerate(storages)]
    expected = [float(index) for index in range(7)]
    generator = torch.Generator().manual_seed(3)
    for turn in range(120):
        at_random = int(torch.randint(7, (), generator=generator))
        index = at_random if turn % 5 == 0 else turn % 7
        assert bool((storages[index].fetch() == expected[index]).all()), turn
        changed = int(torch.randint(7, (), generator=generator))
        if turn % 3 == 0:
            fresh = turn % 2 == 0
            storages[changed].visit(write=True, fresh=fresh)
            if fresh:
                kept[changed].fill_(1000.0 + turn)
                expected[changed] = 1000.0 + turn
            else:
                kept[changed].add_(1)
                expected[changed] += 1
            storages[changed].changed()
    for storage, tensor, value in zip(storages, kept, expected, strict=True):
        storage.visit(write=False)
        assert bool((tensor == value).all())


def test_what_stays_needs_no_visit(shards: MakeShards) -> None:
    storages = shards(5)
    kept = [storage.keep(torch.full((N,), float(index))) for index, storage in enumerate(storages)]
    there = [bool((tensor == index).all()) for index, tensor in enumerate(kept)]
    if storages[0].stays:
        assert all(there)
    else:
        assert there.count(False) == 2, "three slots"
        assert all(tensor.shape == (N,) for tensor in kept)


def test_no_copy_is_made_where_shards_are_beside_the_parameters(shards: MakeShards) -> None:
    (storage,) = shards(1)
    kept = storage.keep(torch.ones(N))
    assert storage.apart or storage.fetch().data_ptr() == kept.data_ptr()


# -- gradients --------------------------------------------------------------------------------------------------------

MakeGradients = Callable[[torch.dtype], GradientStorage]


@pytest.fixture(params=["device", "host", "host that sums", "host with two places"])
def gradients(request: pytest.FixtureRequest) -> Iterator[MakeGradients]:
    link, worker = HostLink(CPU), Worker()

    def make(accumulation: torch.dtype) -> GradientStorage:
        if request.param == "device":
            return DeviceGradientStorage(accumulation)
        return HostGradientStorage(
            link,
            worker,
            accumulation,
            accumulates="sums" in request.param,
            pinned=False,
            places=2 if "two" in request.param else 1,
        )

    yield make
    worker.close()
    link.close()


def check_squares(storage: GradientStorage, gradient: Tensor) -> None:
    """The squared norm is that of the gradient, or is left to others."""
    if storage.squares is not None:
        assert storage.squares.dtype is torch.float32
        expected = gradient.double().square().sum()
        torch.testing.assert_close(storage.squares.double().reshape(()), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("accumulation", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_gradients_are_added_up(gradients: MakeGradients, accumulation: torch.dtype, micro_batches: int) -> None:
    """Also where one micro-batch was expected and more came, and in the next steps, which use the same memory."""
    storage = gradients(accumulation)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        owned: Tensor | None = None
        expected: Tensor | None = None
        for _ in range(micro_batches):
            reduced = torch.randint(-8, 9, (N,), generator=generator).to(torch.bfloat16)  # sums are exact
            owned = storage.add(owned, reduced.clone())
            expected = reduced if expected is None else expected.to(accumulation) + reduced
            storage.settle()
            assert torch.equal(owned.to(accumulation), expected.to(accumulation))
            check_squares(storage, expected)
        assert owned is not None
        assert owned.dtype is (accumulation if micro_batches > 1 else owned.dtype)
        storage.clear()


def test_a_gradient_of_the_users_own_may_stand_in_place_of_the_sum(gradients: MakeGradients) -> None:
    storage = gradients(torch.float32)
    storage.add(None, torch.ones(N))
    storage.settle()
    total = storage.add(torch.full((N,), 5.0), torch.full((N,), 2.0))
    storage.settle()
    assert torch.equal(total, torch.full((N,), 7.0))
    check_squares(storage, total)


def test_what_was_cleared_is_gone(gradients: MakeGradients) -> None:
    storage = gradients(torch.float32)
    storage.add(None, torch.full((N,), 3.0))
    storage.clear()
    kept = storage.add(None, torch.ones(N))
    storage.settle()
    assert torch.equal(kept, torch.ones(N))
    check_squares(storage, kept)
