"""Streams on real GPUs: what runs beside what, nothing stale, nothing waited for, nothing left over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ds_hf import initialize
from ds_hf.engine.zero.at_rest import Noticed, Released
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

WIDTH, BLOCKS = 2048, 6
ARRIVED = (nn.Parameter, Released, Noticed)  # of parameters whose values are where they belong


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def engine_of(stage: int, width: int = WIDTH, blocks: int = BLOCKS, **more: Any) -> Any:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **more,
    }
    with torch.device("cuda"):
        model = Net(width, blocks)
    return initialize(model=model, config=config)[0]


def data(tokens: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator("cuda").manual_seed(100 * seed + rank)
    return torch.randn(tokens, width, device="cuda", generator=generator)


def step(engine: Any, x: Tensor) -> Tensor:
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def read_at_once(stage: int) -> None:
    """Parameters read right after ``step`` are those that are there when everything is done."""
    engine = engine_of(stage)
    for number in range(4):
        step(engine, data(512, seed=number))
        on_the_way = [type(p) not in ARRIVED for p in engine.module.parameters()]
        assert all(on_the_way) == any(on_the_way) == (stage in (1, 2)), on_the_way
        if stage == 3:
            continue
        at_once = [p.detach().clone() for p in engine.module.parameters()]
        assert all(type(p) is nn.Parameter for p in engine.module.parameters())
        torch.cuda.synchronize()
        dist.barrier()
        for early, param in zip(at_once, engine.module.parameters(), strict=True):
            assert torch.equal(early, param)
        for param in engine.module.parameters():
            other = param.detach().clone()
            dist.broadcast(other, 0)
            assert torch.equal(other, param)
    step(engine, data(512))
    engine(data(512))
    assert all(type(p) in ARRIVED for p in engine.module.parameters())
    engine.destroy()


@needs_two
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_never_stale(stage: int) -> None:
    run_distributed(read_at_once, 2, stage, timeout=120, backend="nccl")


def read_through_an_alias() -> None:
    engine = engine_of(2)
    step(engine, data(512))
    aliases = [p.data for p in engine.module.parameters()]
    step(engine, data(512, seed=1))
    assert all(type(p) is nn.Parameter for p in engine.module.parameters()), "somebody looks: nothing is put off"
    copies = [alias.clone() for alias in aliases]
    torch.cuda.synchronize()
    for copy, param in zip(copies, engine.module.parameters(), strict=True):
        assert torch.equal(copy, param)
    del aliases
    step(engine, data(512, seed=2))
    assert all(type(p) is not nn.Parameter for p in engine.module.parameters())
    engine.destroy()


@needs_two
def test_aliases_are_never_stale() -> None:
    run_distributed(read_through_an_alias, 2, timeout=120, backend="nccl")


def no_wait(stage: int) -> None:
    engine = engine_of(stage, width=256)
    batches = [data(64, 256, seed) for seed in range(12)]
    for x in batches[:8]:  # in its first uses stage 3 compares parameters with what they rest in, and waits for that
        step(engine, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in batches[8:]:
            step(engine, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.skipped_steps == 0
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_host_waits_for_nothing_in_bf16(stage: int, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip("needs two GPUs")
    run_distributed(no_wait, world, stage, timeout=120, backend="nccl")


def skip_later(stage: int) -> None:
    """A step with an infinite gradient changes nothing, and the schedule is taken back when the host learns of it."""
    engine = engine_of(stage, width=64, blocks=2)
    for seed in range(2):
        step(engine, data(8, 64, seed))
    before, rate = engine.optimizer.state_dict(), engine.get_lr()
    masters = [m.clone() for m in before["masters"]]
    bad = data(8, 64)
    if dist.get_rank() == 0:
        bad = bad * float("inf")
    step(engine, bad)
    assert engine.lr_scheduler.get_last_lr() != rate, "the host does not know yet"
    assert engine.get_lr() == rate
    assert engine.lr_scheduler.get_last_lr() == rate
    assert engine.skipped_steps == 1
    assert not engine.was_step_applied()
    assert engine.optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(masters, engine.optimizer.state_dict()["masters"], strict=True))
    counts = {float(state["step"]) for state in engine.optimizer.state.values()}
    assert counts == {2.0}
    step(engine, data(8, 64, 5))
    assert engine.was_step_applied()
    assert engine.get_lr() != rate
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_skipped_step_is_noted_later(stage: int, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip("needs two GPUs")
    run_distributed(skip_later, world, stage, timeout=120, backend="nccl")


def no_growth(stage: int) -> tuple[int, int, int]:
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    engine = engine_of(stage, width=64, blocks=3)
    batches = [data(16, 64, seed) for seed in range(4)]
    for number in range(50):
        step(engine, batches[number % 4])
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for number in range(1000):
        step(engine, batches[number % 4])
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - allocated, torch.cuda.memory_reserved() - reserved
    engine.destroy()
    del engine, batches
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return *grown, torch.cuda.memory_allocated() - start


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_stays(stage: int) -> None:
    """Over a thousand steps; and after ``destroy`` only the model, which has its own tensors again, is there."""
    world = min(2, torch.cuda.device_count())
    for allocated, reserved, left in run_distributed(no_growth, world, stage, timeout=240, backend="nccl"):
        assert (allocated, reserved) == (0, 0)
        assert left < 2**20


def trained(stage: int) -> list[float]:
    engine = engine_of(stage, width=512)
    losses = [float(step(engine, data(128, 512, seed))) for seed in range(6)]
    engine.destroy()
    return losses


@needs_two
@pytest.mark.parametrize("stage", [2, 3])
def test_runs_are_alike(stage: int) -> None:
    first = run_distributed(trained, 2, stage, timeout=120, backend="nccl")
    assert first == run_distributed(trained, 2, stage, timeout=120, backend="nccl")


def profiled(stage: int, folder: str, copies: bool) -> dict[str, list[float]]:
    """For each kind of communication: the share of each one's time in which computation ran as well."""
    engine = engine_of(stage, ds_hf={"peer_copies": copies})
    x = data(32768)  # some 50 ms a step: with fewer a GPU waits for a slow host, and nothing is there to hide behind
    for _ in range(4):
        step(engine, x)
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step(engine, x)
        torch.cuda.synchronize()
    trace = Path(folder) / f"{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events]
    kinds = ("Memcpy PtoP", "sum_parts") if copies else ("ReduceScatter", "AllGather")
    updates = sorted(begin for begin, _, name in spans if name == "update")
    started, ended = updates[0], updates[-1]  # ranks begin to trace at other times; nothing follows the last step
    others = ("nccl", "Memcpy", "barrier_kernel", "sum_parts")
    compute = sorted((b, e) for b, e, name in spans if not any(other in name for other in others) and e > started)
    result = {}
    for kind in kinds:
        mine = [(b, e) for b, e, name in spans if kind in name and started < b < ended]
        result[kind] = [
            sum(max(0.0, min(end, e) - max(begin, b)) for b, e in compute) / (end - begin) for begin, end in mine
        ]
    engine.destroy()
    return result


@pytest.mark.alone
@needs_two
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_communication_runs_beside_computation(stage: int, copies: bool, tmp_path: Path) -> None:
    for result in run_distributed(profiled, 2, stage, str(tmp_path), copies, timeout=180, backend="nccl"):
        for kind, shares in result.items():
            assert len(shares) >= 6, kind
            hidden = sum(share > 0.7 for share in shares)
            assert hidden >= 0.5 * len(shares), (kind, [round(share, 2) for share in shares])
