"""Collectives by NCCL itself give what c10d's give, at every stage, and live and die with the process group.

tests/engine/dist/test_nccl.py runs the same functions without a GPU, with a library that plays NCCL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.dist import collectives, nccl
from ds_hf.engine.dist.mesh import Axis, data_parallel_axis
from ds_hf.engine.dist.streams import Lane
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@contextmanager
def counted(*, on: bool = True) -> Iterator[list[bool]]:
    """For each collective that may go to NCCL itself, whether it does; without ``on`` none does."""
    original, found = nccl.of, []

    def of(axis: Axis, *tensors: Tensor) -> Any:
        direct = original(axis, *tensors) if on else None
        found.append(direct is not None)
        return direct

    nccl.of = of  # type: ignore[assignment]
    try:
        yield found
    finally:
        nccl.of = original


def both_ways(collective: Callable[[], list[Tensor]]) -> None:
    """The same bits, and the first time by NCCL itself."""
    with counted() as found:
        direct = collective()
    assert found, "nothing went to NCCL itself"
    assert all(found), "not everything went to NCCL itself"
    with counted(on=False):
        expected = collective()
    for mine, theirs in zip(direct, expected, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine.cpu(), theirs.cpu())


def values(numel: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(numel, generator=generator).to(device, dtype)


def compare(device: str, dtype: torch.dtype, numel: int) -> None:
    axis = data_parallel_axis()
    lane = Lane(torch.device(device, torch.cuda.current_device()) if device == "cuda" else None)
    world, rank = axis.world_size, axis.rank
    late = device == "cuda" and rank == 1  # ranks, and their streams, are out of step

    def gather() -> list[Tensor]:
        shard = values(numel, dtype, device, 1)
        full = torch.empty(world * numel, dtype=dtype, device=device)
        collectives.all_gather(full, shard, axis, "values")
        return [full]

    def gather_in_place() -> list[Tensor]:
        full = torch.zeros(world * numel, dtype=dtype, device=device)
        shard = full[rank * numel : (rank + 1) * numel]
        shard.copy_(values(numel, dtype, device, 2))
        collectives.all_gather(full, shard, axis, "values")
        return [full]

    def gather_each() -> list[Tensor]:
        shards = [values(numel + more, dtype, device, more) for more in (0, 5, 1)]
        shards.append(values(numel, torch.float32, device, 3))
        fulls = [shard.new_empty(world * shard.numel()) for shard in shards]
        collectives.all_gather_each(fulls, shards, axis, ["values"] * len(fulls))
        return fulls

    def reduce(before: float) -> list[Tensor]:
        full = values(world * numel, dtype, device, 4)
        return [collectives.reduce_gradient(full, axis, scatter=True, scale_before=before, scale_after=1.0)]

    def on_the_lane() -> list[Tensor]:
        """Each reads on one stream what the one before wrote on the other."""
        with lane:
            if late:
                torch.cuda._sleep(20_000_000)
            (reduced,) = reduce(1 / world)
        lane.join()
        full = torch.empty(world * numel, dtype=dtype, device=device)
        collectives.all_gather(full, reduced, axis, "values")
        with lane:
            again = collectives.reduce_gradient(
                full * 2, axis, scatter=True, scale_before=1.0, scale_after=0.5, what="values"
            )
        lane.join()
        return [full, again]

    for collective in (gather, gather_in_place, gather_each, lambda: reduce(1.0), lambda: reduce(1 / world)):
        both_ways(collective)
    both_ways(on_the_lane)


def compare_all(device: str) -> None:
    dist.all_reduce(torch.ones(1, device=device))  # torch makes the communicator
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64):
        for numel in (1, 4096, 100_003):
            compare(device, dtype, numel)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def losses(stage: int, device: str, width: int = 64) -> list[float]:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "ds_hf": {"peer_copies": False},
    }
    model = nn.Sequential(*(Block(width) for _ in range(3)), nn.Linear(width, 1)).to(device)
    engine = initialize(model=model, config=config)[0]
    found = []
    for seed in range(3):
        loss = engine(values(8 * width, torch.bfloat16, device, seed).view(8, width)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def train_both_ways(stage: int, device: str) -> tuple[int, int]:
    """How many collectives went to NCCL itself, and how many might have."""
    with counted(on=False):
        expected = losses(stage, device)
    with counted() as direct:
        found = losses(stage, device)
    assert found == expected
    return sum(direct), len(direct)


def check_gather(axis: Axis, device: str) -> bool:
    """Whether a gather, of right values, went to NCCL itself."""
    full = torch.zeros(2 * 64, device=device)
    with counted() as direct:
        collectives.all_gather(full, torch.full((64,), axis.rank + 1.0, device=device), axis, "values")
    assert full.tolist() == [1.0] * 64 + [2.0] * 64
    return direct[0]


def come_and_go(folder: str, device: str, backend: str) -> list[bool]:
    """What went to NCCL itself: the first and the second gather of one default group after the other, of a group
    beside each, and of the first group once it is gone."""
    found, old = [], None
    for number in range(3):
        if number:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/{number}",
                rank=int(os.environ["RANK"]),
                world_size=2,
            )
        world, beside = data_parallel_axis(), data_parallel_axis(group=dist.new_group())
        for axis in (world, beside):
            found += [check_gather(axis, device) for _ in range(2)]
        if old is not None:
            assert nccl.of(old, torch.zeros(4, device=device)) is None
        old = Axis(dist.group.WORLD, world.rank, 2)
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
        for axis in (world, beside, old):
            assert nccl.of(axis, torch.zeros(4, device=device)) is None, "a communicator that is gone"
    return found


def host_microseconds(device: str) -> dict[str, tuple[float, float]]:
    """Of one call, by NCCL itself and by c10d."""
    axis = data_parallel_axis()
    dist.all_reduce(torch.ones(1, device=device))
    fulls = [torch.empty(2 * 4096, dtype=torch.bfloat16, device=device) for _ in range(8)]
    shards = [full[:4096].clone() for full in fulls]
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: collectives.all_gather(fulls[0], shards[0], axis, "values"),
        "reduce-scatter": lambda: collectives.reduce_gradient(
            fulls[0], axis, scatter=True, scale_before=0.5, scale_after=1.0, what="values"
        ),
        "8 all-gathers": lambda: collectives.all_gather_each(fulls, shards, axis, ["values"] * 8),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, call in calls.items():
        both = []
        for on in (True, False):
            best = float("inf")
            for _ in range(10):  # rounds so short that the host is not stopped by a full stream
                with counted(on=on):
                    if device == "cuda":
                        torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for _ in range(50):
                        call()
                    best = min(best, (time.perf_counter() - begin) / 50)
            both.append(1e6 * best)
        found[name] = (both[0], both[1])
    return found


def test_the_same_bits() -> None:
    run_distributed(compare_all, 2, "cuda", timeout=120, backend="nccl")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_the_same(stage: int) -> None:
    for direct, possible in run_distributed(train_both_ways, 2, stage, "cuda", timeout=120, backend="nccl"):
        assert possible >= 3
        assert direct >= possible - 1, "all but the group's first collective"


def test_groups_come_and_go(tmp_path: Path) -> None:
    for found in run_distributed(come_and_go, 2, str(tmp_path), "cuda", "nccl", timeout=120, backend="nccl"):
        assert len(found) == 12
        assert all(found[1::2]), "a group's first collective has made its communicator"


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NAN_CHECK"])
def test_what_debugs_c10d_stays_with_it(name: str) -> None:
    for direct, possible in run_distributed(
        train_both_ways, 2, 2, "cuda", timeout=120, backend="nccl", env={name: "1"}
    ):
        assert possible >= 3
        assert direct == 0


def test_time_of_the_host() -> None:
    """Prints it (pytest -s)."""
    for rank, found in enumerate(run_distributed(host_microseconds, 2, "cuda", timeout=120, backend="nccl")):
        for name, (direct, by_c10d) in found.items():
            print(f"rank {rank}, {name}: {direct:.1f} us by NCCL itself, {by_c10d:.1f} us by c10d")
