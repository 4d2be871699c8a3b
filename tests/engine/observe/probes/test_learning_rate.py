"""The learning-rate search leaves no bit of the engine changed, takes the same way on all ranks, and finds a rate."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_hf
from ds_hf.engine.observe.probes.learning_rate import script as script_module
from ds_hf.engine.observe.probes.learning_rate.feeding import drive
from ds_hf.engine.observe.probes.learning_rate.probe import Deadline, Fed, Want, search
from ds_hf.engine.observe.probes.snapshot import Snapshot
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.lr import LrOptions, LrResult
from ds_hf.measure.saving import LR_ENV
from tests.engine.checkpoint.workload import VOCABULARY, Model, build, config, differences, engine_of, states, train
from tests.helpers.distributed import run_distributed

SMALL: dict[str, Any] = {
    "num_steps": 14, "seeds": 2, "confirm_steps": 4, "moment_steps": 2, "train_batches": 6, "held_out_batches": 2,
}  # fmt: skip


def batches(count: int, rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(77 + rank)
    return [torch.randint(0, VOCABULARY, (2, 5), generator=generator) for _ in range(count)]


def digest(engine: Any, folder: Path) -> Any:
    """What the engine's own checkpoint says that it holds."""
    engine.save_checkpoint(folder, tag="it")
    return json.loads((folder / "it" / "manifest.json").read_text())["digest"]


def searched(stage: int, dtype: str, folder: Path, options: dict[str, Any] = SMALL) -> tuple[LrResult, list[str]]:
    """Train, search, train on; the result and everything that differs from a run without a search."""
    content = config(stage, dtype)
    torch.manual_seed(1)
    with engine_of(content, Model(dropout=0.2)) as engine:
        train(engine, 3)
        before, digest_before = states(engine), digest(engine, folder)
        result = engine.lr_range_test(batches(8, engine.axis.rank), **options)
        wrong = differences(before, states(engine))
        wrong += [] if digest(engine, folder) == digest_before else ["digest"]
        with_search = train(engine, 3, 3)
    torch.manual_seed(1)
    with engine_of(content, Model(dropout=0.2)) as engine:
        train(engine, 3)
        wrong += [] if train(engine, 3, 3) == with_search else ["losses afterwards"]
    return result, wrong


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16"), (0, "fp16"), (2, "fp16")],
)
def test_nothing_is_changed(stage: int, dtype: str, tmp_path: Path) -> None:
    """Masters, moments, counters, scaler, schedule, buffers and random states, by value and by digest; dropout."""
    result, wrong = searched(stage, dtype, tmp_path)
    assert wrong == []
    assert len(result.sweeps) == 2
    assert result.sweeps[0].train != result.sweeps[1].train
    assert 1e-4 < result.lr < 10


@pytest.mark.parametrize(
    "more",
    [
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"gradient_accumulation_steps": 2},
        {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}}},
    ],
    ids=["offload", "stochastic", "accumulation", "lamb", "sgd", "onecycle"],
)  # fmt: skip
def test_nothing_is_changed_elsewhere(more: dict[str, Any], tmp_path: Path) -> None:
    content = {**config(2), **more}
    with engine_of(content) as engine:
        steps = engine.gradient_accumulation_steps()
        train(engine, 2 * steps)
        snapshot, before = Snapshot(engine), digest(engine, tmp_path)
        engine.lr_range_test(batches(8 * steps), **{**SMALL, "num_steps": 10, "seeds": 1, "confirm_steps": 3})
        assert snapshot.differences() == []
        assert digest(engine, tmp_path) == before
        train(engine, 1)
        assert snapshot.differences() != []


def _on_ranks(folder: Path) -> list[Any]:
    found: list[Any] = []
    options = {**SMALL, "num_steps": 12, "seeds": 1, "confirm_steps": 3, "held_out_batches": 1, "max_lr": 1e4}
    for stage, dtype in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32")):
        result, wrong = searched(stage, dtype, folder / f"{stage}{dtype}", options)
        found.append((result.lr, result.sweeps, result.runs, wrong))
    return found


def test_two_processes_take_the_same_way(tmp_path: Path) -> None:
    """Each has other batches; the search ends on both at the same update, also where it diverges."""
    mine, other = run_distributed(_on_ranks, 2, tmp_path, timeout=110)
    assert mine == other
    assert [row[3] for row in mine] == [[]] * 4
    assert any(sweep.diverged_at is not None for row in mine for sweep in row[1])


def _until(at: float, moment_steps: int = 2) -> tuple[Any, list[dict[str, Any]]]:
    """A search on a clock that goes on by one, on rank 1 by two, whenever it is looked at."""
    told: list[dict[str, Any]] = []
    with engine_of(config(1, "fp32"), Model(dropout=0.2)) as engine:
        clock = itertools.count(0, 1 + engine.axis.rank)
        at_hand, before = batches(8, engine.axis.rank), states(engine)

        def feed(want: Want) -> Fed:
            loss = engine(at_hand[want.batch])
            return Fed(loss)

        options = LrOptions(**{**SMALL, "num_steps": 12, "confirm_steps": 9, "moment_steps": moment_steps})
        try:
            found = drive(search(engine, options, told.append, Deadline(at, lambda: float(next(clock)))), feed)
        except DsHfError as error:
            return str(error), told
        assert differences(before, states(engine)) == []
    return (found.lr, [len(sweep.lrs) for sweep in found.sweeps], found.runs, found.notes), told


def _all_until() -> list[Any]:
    return [_until(1e6), _until(450.0), _until(210.0, 0), _until(45.0, 0), _until(12.0, 0)]


def test_the_best_so_far_when_time_is_over() -> None:
    """Processes whose clocks differ stop at the same update; what is planned ends in time."""
    mine, other = run_distributed(_all_until, 2, timeout=110)
    assert [result for result, _ in mine] == [result for result, _ in other]
    (enough, told), (planned, shorter), (some, _), (sweep, _), (nothing, _) = mine
    assert not enough[3]
    assert [event["shorter"] for event in told if event["phase"] == "plan"] == [False]
    assert [event["shorter"] for event in shorter if event["phase"] == "plan"] == [True]
    assert planned[3][0].startswith("shorter, to be in time: sweeps of ")
    assert len(some[1]) == 2
    assert 0 < len(some[2]) < len(enough[2])
    assert "time was over: this is the best so far" in some[3][-1]
    assert len(sweep[1]) == 1
    assert not sweep[2]
    assert sweep[0] > 0
    assert "time was over after" in nothing
    assert "--budget gives it more" in nothing


def test_finds_the_rate_of_a_known_problem() -> None:
    """SGD on a quadratic whose curvature is 1 diverges above 2; noiseless, so rates near 1 are best."""

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 3.0))

        def forward(self, target: Tensor) -> Tensor:
            return 0.5 * (self.weight - target).square().sum() + 1

    content = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = ds_hf.initialize(model=Quadratic(), config=content)[0]
    result = engine.lr_range_test([torch.zeros(4)] * 4, max_lr=100, confirm_steps=10, total_steps=40)
    engine.destroy()
    assert 1.0 < result.marks.limit < 20
    assert 0.1 < result.lr < 2.5
    assert result.optimizer == "SGD"
    assert not result.cycles_momentum
    assert {row["name"] for row in result.to_dict()["schedules"]} >= {"OneCycle", "WarmupDecayLR"}
    assert engine.destroyed


def test_groups_keep_their_ratio() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[1].parameters(), "lr": 1e-2}]
    engine = ds_hf.initialize(
        model=model, optimizer=torch.optim.SGD(groups, lr=1e-3), config={"train_micro_batch_size_per_gpu": 1}
    )[0]

    def loss_of(engine: Any, batch: Tensor) -> Tensor:
        seen.append([group["lr"] for group in engine.optimizer.param_groups])
        return engine(batch).square().mean()

    engine.lr_range_test([torch.randn(2, 3) for _ in range(8)], loss_of=loss_of, **SMALL)
    assert all(low == pytest.approx(high / 10) for low, high in seen)
    assert max(high for _, high in seen) == pytest.approx(max(high for _, high in seen))
    assert engine.get_lr() == [1e-3, 1e-2]
    engine.destroy()


def test_an_error_inside_leaves_the_engine_as_it_was() -> None:
    with engine_of(config(3)) as engine:
        train(engine, 2)
        before, calls = states(engine), []
        steps: list[Any] = []
        engine.step_hooks.append(steps.append)

        def loss_of(engine: Any, batch: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 9:
                raise RuntimeError("the model broke")
            return engine(batch)  # type: ignore[no-any-return]

        with pytest.raises(RuntimeError, match="the model broke"):
            engine.lr_range_test(batches(8), loss_of=loss_of, **SMALL)
        assert differences(before, states(engine)) == []
        assert engine.lr_scheduler is not None
        assert not steps
        train(engine, 1)
        assert steps == [engine]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("few", "at least two updates"),
        ("inside", "between optimizer steps"),
        ("no loss", "the model returns no loss"),
        ("nan", "fewer than three finite losses|the loss is nan"),
        ("no optimizer", "needs an engine with an optimizer"),
    ],
)
def test_what_cannot_be_searched(problem: str, text: str) -> None:
    content = config(1, gradient_accumulation_steps=2 if problem == "inside" else 1)
    if problem == "no optimizer":
        del content["optimizer"], content["scheduler"]
    with engine_of(content) as engine:
        data: list[Any] = batches(1 if problem == "few" else 16)
        loss_of = None
        if problem == "inside":
            engine.backward(engine(data[0]))
        if problem == "no loss":
            engine.module.forward = lambda tokens: {"logits": tokens}
        if problem == "nan":
            loss_of = lambda engine, batch: engine(batch) * math.nan  # noqa: E731
        with pytest.raises((DsHfError, ValueError), match=text):
            engine.lr_range_test(data, loss_of=loss_of, **SMALL)


# -- inside a script ------------------------------------------------------------------------------------------------


class External(nn.Module):
    """Returns an output, of which the script computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    content = {"options": SMALL, "result": str(folder / "result.json"), "progress": str(folder / "progress.jsonl")}
    (folder / "job.json").write_text(json.dumps(content))
    monkeypatch.setenv(LR_ENV, str(folder / "job.json"))
    monkeypatch.setattr(script_module, "leave", sys.exit)  # the process is pytest's
    monkeypatch.setattr(script_module, "SaveGuard", mock.MagicMock())
    return folder / "result.json"


def outcome(path: Path) -> LrResult:
    return LrResult.from_dict(json.loads(path.read_text())["result"])


def test_a_script_whose_model_returns_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are kept and used again: the same for all rates, so the script gives only eight of them."""
    path = job(tmp_path, monkeypatch)
    engine = build(config(3))
    with pytest.raises(SystemExit) as end:
        train(engine, 1000)
    assert end.value.code == 0
    assert engine.global_steps == 0
    assert outcome(path).lr > 0
    events = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["phase"] == "record"] == list(range(1, 9))
    assert {event["phase"] for event in events} == {"record", "sweep", "run"}
    engine.destroy()


def test_a_script_that_scales_the_loss_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Trainer does on several processes; here by 3, with two micro-batches an update that it divides itself."""
    path = job(tmp_path, monkeypatch)
    engine = build(config(1, gradient_accumulation_steps=2))
    usual = sum(float(engine.module(tokens).detach()) for tokens in batches(16)) / 16

    def script() -> None:
        for tokens in batches(100):
            loss = engine(tokens)
            loss *= 3
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()

    with pytest.raises(SystemExit):
        script()
    assert outcome(path).sweeps[0].train[0] == pytest.approx(2 * 3 * usual, rel=0.5)  # batches differ
    engine.destroy()


def test_a_script_that_computes_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loop feeds the search; two micro-batches an update."""
    path = job(tmp_path, monkeypatch)
    torch.manual_seed(0)
    content = {**config(2, gradient_accumulation_steps=2), "scheduler": None}
    engine = ds_hf.initialize(model=External(), config={k: v for k, v in content.items() if v is not None})[0]

    def script() -> None:
        for _ in range(5000):
            x = torch.randn(8, 4)
            loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()

    with pytest.raises(SystemExit):
        script()
    result = outcome(path)
    assert 1e-4 < result.lr < 1
    assert '"phase": "feed"' in (tmp_path / "progress.jsonl").read_text()
    engine.destroy()


def test_a_script_that_fails_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job(tmp_path, monkeypatch)
    engine = build(config(1))
    engine.module.scale.data.fill_(math.nan)
    with pytest.raises(DsHfError, match="the loss is nan"):
        train(engine, 20)
    assert "the loss is nan" in json.loads(path.read_text())["error"]
    engine.destroy()


def test_without_the_variable_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with engine_of(config(1)) as engine:
        assert not {"forward", "backward", "step"} & set(engine.__dict__)
    monkeypatch.setenv(LR_ENV, str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match="a job that cannot be read"):
        build(config(1))


def test_options_reach_the_search() -> None:
    with engine_of(config(1)) as engine:
        options = LrOptions(**SMALL)
        result = engine.lr_range_test(batches(8), options=options, seeds=1, confirm_steps=0, mode="linear", max_lr=0.01)
        assert [sweep.seed for sweep in result.sweeps] == [0]
        assert result.runs == ()
        first, second, third = result.sweeps[0].lrs[:3]
        assert third - second == pytest.approx(second - first)
        assert result.sweeps[0].lrs[-1] == pytest.approx(0.01)
