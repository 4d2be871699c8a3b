"""Split masters: the same training, in two bytes a parameter less, whoever looks at the masters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf import Engine, initialize
from ds_hf.engine import parts
from ds_hf.engine.observe.probes.snapshot import Snapshot
from ds_hf.engine.ops.split_master import split_fp32
from ds_hf.engine.optim.host_store import HostPlace, HostStore
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.optim.stream_share import Room
from ds_hf.engine.zero.access import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from ds_hf.engine.zero.gather import GatheredParameters
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config

STAGES = (0, 1, 2, 3)
# States in host memory: all go over the device to be updated, or two thirds, or half of them are there, or move there.
WAYS: tuple[dict[str, Any], ...] = (
    {"stream": 1.0},
    {"stream": 0.65},
    {"ratio": 0.5, "stream": 0.0},
    {"ratio": 0.4, "stream": 0.5},
    {"ratio": "auto", "stream": 0.5},
)
away: dict[str, Any] | None = None  # of these, for all engines
RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2},
    "Lion": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}


def make(stage: int, split: bool, *, rule: str = "AdamW", optimizer: Any = None, **more: Any) -> Engine:
    torch.manual_seed(3)
    own: dict[str, Any] = {"split_masters": split}
    if away is not None and stage:
        own["offload"] = away
        more["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = base_config(stage, bf16={"enabled": True}, ds_hf=own, gradient_clipping=1.0, **more)
    model = TinyLM(vocab=64, width=48, depth=2)
    if optimizer is not None:
        config.pop("optimizer", None)
        return initialize(model=model, optimizer=optimizer(model.parameters()), config=config)[0]
    config["optimizer"] = {"type": rule, "params": RULES[rule]}
    return initialize(model=model, config=config)[0]


def train(engine: Engine, steps: int = 4) -> list[float]:
    losses = []
    for batch in token_batches(steps, 4, vocab=64):
        loss = engine(batch[None])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def optimizer_of(engine: Engine) -> ShardedOptimizer:
    assert engine.optimizer is not None
    return engine.optimizer


def masters(engine: Engine) -> list[Tensor]:
    found = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    assert all(master is not None and master.dtype is torch.float32 for master in found)
    return [master for master in found if master is not None]


def weights(engine: Engine) -> list[Tensor]:
    with GatheredParameters(engine.module.parameters()):
        return [param.detach().clone() for param in engine.module.parameters()]


def close(mine: list[Tensor], others: list[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def trains_as_whole_masters_do(stage: int) -> None:
    for rule in RULES if stage == 1 else ("AdamW",):  # a rule sees shards, however they came there
        split, whole = make(stage, True, rule=rule), make(stage, False, rule=rule)
        assert optimizer_of(split).low_bits
        assert not optimizer_of(whole).low_bits
        close(masters(split), masters(whole), 0)  # exact from the start: the model came in fp32
        assert train(split) == pytest.approx(train(whole), rel=2e-3)  # kernels and reference round apart
        close(masters(split), masters(whole), 2e-3)
        for master, weight in zip(masters(split), weights(split), strict=True):
            assert torch.equal(split_fp32(master)[0], weight)
        saved = optimizer_of(whole).nbytes - optimizer_of(split).nbytes
        assert saved == sum(2 * low.numel() for low in optimizer_of(split).low_bits.values())
        split.destroy()
        whole.destroy()


def is_seen_and_written(stage: int) -> None:
    engine = make(stage, True)
    train(engine, 2)
    param = next(iter(engine.module.parameters()))
    value = torch.rand(param.ds_shape if hasattr(param, "ds_shape") else param.shape) + 1 / 3
    safe_set_full_fp32_param(param, value)
    got = safe_get_full_fp32_param(param)
    assert got is not None
    assert torch.equal(got, value)
    assert torch.equal(weights(engine)[0], split_fp32(value)[0])
    piece = safe_get_local_fp32_param(param)
    assert piece is not None
    safe_set_local_fp32_param(param, piece / 3)
    got = safe_get_full_fp32_param(param)
    assert got is not None
    assert torch.equal(got, value / 3)
    if stage == 3:
        with GatheredParameters([param], modifier_rank=0):
            param.data.fill_(0.3)
        got = safe_get_full_fp32_param(param)
        assert got is not None
        assert torch.equal(got, torch.full_like(got, torch.tensor(0.3).bfloat16().item()))
    engine.destroy()


def joins_for_hooks_and_names(stage: int) -> None:
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(params), lr=1e-2)

    hooked, free = make(stage, True, optimizer=adam), make(stage, True, optimizer=adam)
    first = train(hooked, 2)
    assert first == train(free, 2)
    before = masters(hooked)
    calls: list[int] = []
    places = dict(getattr(optimizer_of(hooked).store, "places", {}))
    optimizer_of(hooked).optimizer.register_step_post_hook(lambda *_: calls.append(1))
    close(masters(hooked), before, 0)
    assert train(hooked, 2) == pytest.approx(train(free, 2), rel=2e-3)
    assert calls == [1, 1]
    assert not optimizer_of(hooked).low_bits
    for buffer, place in places.items():  # masters come to where the moments are
        kept = optimizer_of(hooked).store.places[buffer]  # type: ignore[attr-defined]
        assert (kept is HostPlace.DEVICE) == (place is HostPlace.DEVICE)
    close(masters(hooked), masters(free), 2e-3)

    optimizer = optimizer_of(free)
    before = masters(free)
    for param in optimizer.single_partition_of_fp32_groups:
        assert param.dtype is torch.float32
        param.data += 1
    optimizer.update_lp_params()
    close(masters(free), [master + 1 for master in before], 0)
    assert torch.equal(weights(free)[0], (before[0] + 1).bfloat16())
    train(free, 1)
    hooked.destroy()
    free.destroy()


def gives_its_state_back(stage: int) -> None:
    for source in (True, False):
        engine, other = make(stage, source), make(stage, True)
        train(engine, 3)
        state = copy.deepcopy(optimizer_of(engine).state_dict())
        optimizer_of(other).load_state_dict(state)
        close(masters(other), masters(engine), 0)
        kept = [value for s in optimizer_of(other).state.values() for value in s.values()]
        given = [value for s in optimizer_of(engine).state.values() for value in s.values()]
        assert [value.dtype for value in kept] == [value.dtype for value in given]
        assert all(map(torch.equal, kept, given))
        assert train(engine, 2) == pytest.approx(train(other, 2), rel=2e-3)
        engine.destroy()
        other.destroy()


def comes_back(stage: int) -> None:
    """After a trial of the autotuner, and after a learning-rate range test."""
    engine = make(stage, True)
    train(engine, 2)
    for gradients in (True, False):
        snapshot = Snapshot(engine, gradients=gradients)
        before, values = masters(engine), weights(engine)
        losses = train(engine, 3)
        after = masters(engine)
        snapshot.restore()
        close(masters(engine), before, 0)
        close(weights(engine), values, 0)
        assert train(engine, 3) == losses
        close(masters(engine), after, 0)
    engine.destroy()


def continues_checkpoints(stage: int, folder: str) -> None:
    for before, after in ((True, True), (True, False), (False, True)):
        name = f"{before}-{after}"
        engine = make(stage, before)
        train(engine, 3)
        engine.save_checkpoint(folder, tag=name)
        expected, saved = masters(engine), weights(engine)
        resumed = make(stage, after)
        resumed.load_checkpoint(folder, tag=name)
        close(masters(resumed), expected, 0)
        if before is after:  # else ties are rounded the other way
            close(weights(resumed), saved, 0)
        assert train(resumed, 2) == pytest.approx(train(engine, 2), rel=2e-3)
        if before and after:
            close(masters(resumed), masters(engine), 0)
        engine.destroy()
        resumed.destroy()


def scenarios(folder: str) -> None:
    for stage in STAGES:
        for scenario in (trains_as_whole_masters_do, is_seen_and_written, joins_for_hooks_and_names):
            print("case", scenario.__name__, stage)
            scenario(stage)
    for stage in STAGES:
        gives_its_state_back(stage)
        continues_checkpoints(stage, f"{folder}/{stage}")


def offloaded(folder: str, way: dict[str, Any]) -> None:
    global away
    Room.free_nbytes = lambda _: 1 << 30  # type: ignore[method-assign]
    for stage in STAGES[1:]:
        away = None
        here = make(stage, True)
        expected = train(here)
        away = way
        gone = make(stage, True)
        assert train(gone) == pytest.approx(expected, rel=2e-3)  # the CPU's kernel and the reference round apart
        store = optimizer_of(gone).store
        assert isinstance(store, HostStore)
        elsewhere = {b for b, place in store.places.items() if place is not HostPlace.HOST}
        if way.get("ratio") == "auto":  # after the second step all are there, some with whole masters
            assert elsewhere == set(store.places) > optimizer_of(gone).low_bits.keys() != set()
        else:
            assert optimizer_of(gone).low_bits.keys() == elsewhere
        close(masters(gone), masters(here), 2e-3)
        here.destroy()
        gone.destroy()
        for scenario in (is_seen_and_written, joins_for_hooks_and_names, gives_its_state_back, comes_back):
            scenario(stage)
        continues_checkpoints(stage, f"{folder}/{stage}")


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_scenarios(world: int, tmp_path: Path) -> None:
    run_distributed(scenarios, world, str(tmp_path), timeout=200)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_states_that_come_from_host_memory(way: dict[str, Any], world: int, tmp_path: Path) -> None:
    run_distributed(offloaded, world, str(tmp_path), way, timeout=200)


def where_it_does_not_apply() -> None:
    def lamb(params: Any) -> torch.optim.Optimizer:
        return FusedLamb(list(params), lr=1e-3)

    def unknown(params: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(list(params), lr=1e-3)

    by_the_cpu = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    told: list[str] = []
    parts.warn_once = told.append
    for engine in (
        make(2, True, optimizer=lamb),
        make(2, True, optimizer=unknown),
        make(2, True, **by_the_cpu),
        initialize(model=TinyLM(vocab=64, width=48, depth=2), config=base_config(2, ds_hf={"split_masters": True}))[0],
        initialize(model=TinyLM(vocab=64, width=48, depth=2), config=base_config(2, bf16={"enabled": True}))[0],
    ):
        assert not optimizer_of(engine).low_bits  # the last: "auto" is for GPUs
        train(engine, 2)
        engine.destroy()
    assert sum("split_masters has no effect" in message for message in told) == 4  # all who asked for it


def test_where_it_does_not_apply() -> None:
    run_distributed(where_it_does_not_apply, 1, timeout=100)
