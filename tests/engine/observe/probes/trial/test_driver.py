"""A trial inside a real engine: what it says, that it leaves the state alone, that ranks run out of memory together."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hf import initialize
from ds_hf.engine.observe.probes.trial.driver import attach
from ds_hf.engine.observe.probes.trial.memory import TensorMeter
from ds_hf.engine.observe.probes.trial.survey import set_checkpointing
from ds_hf.measure.protocol import TrialRequest, read_events
from tests.helpers.distributed import run_distributed

HIDDEN, DEPTH, TOKENS = 64, 3, 16


class Net(nn.Module):
    """Blocks of a ModuleList and dropout; returns its loss as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(DEPTH))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(HIDDEN, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        for block in self.blocks:
            x = x + block(self.drop(x))
        return {"loss": nn.functional.cross_entropy(self.head(x.mean(1)), labels)}


class Bare(Net):
    """Returns logits: the loss is the script's."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.head(x.mean(1))


def make_engine(stage: int, model: type[Net] = Net, **more: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more,
    }  # fmt: skip
    return initialize(model=model(), config=config)[0]


def batch_of(engine: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * engine.axis.rank + seed)
    labels = torch.randint(4, (4,), generator=generator)
    return {"x": torch.randn(4, TOKENS, HIDDEN, generator=generator), "labels": labels}


def train(engine: Any, micro_steps: int, start: int = 0) -> list[float]:
    losses = []
    for index in range(start, start + micro_steps):
        loss = engine(**batch_of(engine, index))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def requested(folder: str, **values: Any) -> TrialRequest:
    return TrialRequest(
        **{"events": f"{folder}/events.jsonl", "finish": False, "steps": 8, "point_seconds": 2.0, **values}
    )


def events_of(folder: str | Path) -> list[dict[str, Any]]:
    return [event for event, _ in read_events(Path(folder) / "events.jsonl")]


def run_both(stage: int, warm: int, folder: str) -> tuple[list[float], list[float], list[int]]:
    """The same training without and with a trial in the middle."""
    plain = make_engine(stage)
    torch.manual_seed(7)
    expected = train(plain, warm + 6)
    weights = [p.detach().clone() for p in plain.module.parameters()]
    plain.destroy()
    engine = make_engine(stage)
    torch.manual_seed(7)
    found = train(engine, warm)
    request = requested(folder, points=((1, 8), (8, 1), (4, 2)), survey=True, memory_limit=10**8)
    driver = attach(engine, request)
    found += train(engine, 6, warm)
    assert driver is not None
    assert driver.done
    same = all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))
    counters = [engine.global_steps, engine.accumulation.micro_steps, int(engine.module.calls), int(same)]
    assert engine.batch == (8 * engine.axis.world_size, 4, 2)
    return expected, found, counters


@pytest.mark.parametrize(
    ("stage", "warm"), [(0, 3), (3, 0), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 0), (2, 3)))]
)
def test_training_goes_on_as_if_nothing_had_been(stage: int, warm: int, tmp_path: Path) -> None:
    """Also in the middle of an accumulation (after 3 micro-batches of 2), with dropout and a module buffer."""
    for expected, found, counters in run_distributed(run_both, 2, stage, warm, str(tmp_path)):
        assert found == expected
        assert counters[:3] == [(warm + 6) // 2, warm + 6, warm + 6]
        assert counters[3] == 1 or stage == 3  # at stage 3 parameters are at rest
    points = {e["micro"]: e for e in events_of(tmp_path) if e["event"] == "point"}
    assert points.keys() == {1, 4, 8}
    assert all(
        point["outcome"] == "ok" and point["low"] <= point["seconds"] <= point["high"] for point in points.values()
    )
    assert points[1]["peak"] < points[4]["peak"]  # both accumulate, which takes memory too


def first_step_without_sync(folder: str) -> list[int]:
    """As accelerate's ``accumulate()`` does: the first micro-batch, whose forward is replayed, is inside no_sync()."""
    engine = make_engine(1)
    attach(engine, requested(folder, points=((2, 4), (4, 2))))
    with engine.no_sync():
        loss = engine(**batch_of(engine, 0))["loss"]
        assert engine.reducer.suspended
        engine.backward(loss)
    return [engine.global_steps, int(engine.reducer.suspended)]


def test_a_step_inside_no_sync_is_replayed(tmp_path: Path) -> None:
    assert run_distributed(first_step_without_sync, 2, str(tmp_path)) == [[0, 0], [0, 0]]
    points = [e for e in events_of(tmp_path) if e["event"] == "point"]
    assert {point["micro"] for point in points} == {2, 4}
    assert {point["outcome"] for point in points} == {"ok"}


def measure(folder: str, limit: int | None, model: type[Net] = Net, **values: Any) -> int:
    engine = make_engine(2, model)
    driver = attach(engine, requested(folder, memory_limit=limit, **values))
    assert driver is not None
    if model is Bare:
        for index in range(8):
            batch = batch_of(engine, index)
            engine.backward(nn.functional.cross_entropy(engine(**batch), batch["labels"]))
            engine.step()
    else:
        train(engine, 8)
    return int(driver.done)


def in_eval_mode(folder: str) -> bool:
    engine = make_engine(2)
    driver = attach(engine, requested(folder, points=((4, 2),)))
    assert driver is not None
    engine.eval()
    engine(**batch_of(engine, 0))  # an evaluation that builds a graph, for all that is known
    assert not driver.done
    train(engine, 4)
    return driver.done


def test_a_script_that_trains_in_eval_mode_is_measured(tmp_path: Path) -> None:
    """``from_pretrained`` gives models in it, and many loops leave them so."""
    assert run_distributed(in_eval_mode, 1, str(tmp_path)) == [True]
    assert any(e["event"] == "point" and e["outcome"] == "ok" for e in events_of(tmp_path))


def test_limit_is_out_of_memory_on_every_rank(tmp_path: Path) -> None:
    """Sizes that fit are measured, larger ones are not, and training goes on."""
    sizes = ((1, 8), (4096, 1), (16, 2), (8192, 1))
    assert run_distributed(measure, 2, str(tmp_path), 4_000_000, points=sizes) == [1, 1]
    points = {e["micro"]: e for e in events_of(tmp_path) if e["event"] == "point"}
    assert {m: p["outcome"] for m, p in points.items()} == {1: "ok", 4096: "oom", 16: "ok", 8192: "oom"}
    assert points[1]["peak"] < points[16]["peak"] < 4_000_000 < points[4096]["peak"]


def test_inputs_that_do_not_fit_are_out_of_memory(tmp_path: Path) -> None:
    """2**50 samples are more bytes than there are addresses, before any operator of the model runs: a machine that
    promises memory which it has not (4 PiB of 2**40) kills the process instead."""
    assert run_distributed(measure, 2, str(tmp_path), None, points=((4, 2), (1 << 50, 1))) == [1, 1]
    points = {e["micro"]: e for e in events_of(tmp_path) if e["event"] == "point"}
    assert {m: p["outcome"] for m, p in points.items()} == {4: "ok", 1 << 50: "oom"}


def test_peaks_are_the_same_every_time(tmp_path: Path) -> None:
    peaks = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        run_distributed(measure, 1, str(folder), 4_000_000, points=((1, 8), (16, 2)))
        peaks.append([e["peak"] for e in events_of(folder) if e["event"] == "point"])
    assert peaks[0] == peaks[1]
    assert peaks[0][0] < peaks[0][1]


def test_own_axis_is_measured_outwards(tmp_path: Path) -> None:
    run_distributed(measure, 1, str(tmp_path), None, own_axis=True, natural_steps=2)
    events = events_of(tmp_path)
    sizes = [(e["micro"], e["accumulation"]) for e in events if e["event"] == "point"]
    assert sizes == 2 * [(4, 2), (8, 1), (2, 4), (1, 8)]  # after a first visit, and at the end
    machine, beside = (e for e in events if e["event"] == "machine")
    assert machine["levels"].keys() == beside["levels"].keys() == {"compute", "copy"}
    assert all(seconds > 0 and error >= 0 for seconds, error in machine["levels"].values())
    assert machine["drift"] >= 1
    assert beside["phase"] == "natural"
    assert len([e for e in events if e["event"] == "step" and e["kind"] == "natural"]) == 2
    assert events[0]["event"] == "facts"
    assert events[-1]["event"] == "done"
    assert events[0]["total"] == sum(p.numel() for p in Net().parameters())


def test_the_largest_size_may_be_beyond_the_own_batch(tmp_path: Path) -> None:
    run_distributed(measure, 1, str(tmp_path), 4_000_000, own_axis=True, largest=True, high_micro=2**13)
    outcomes = {e["micro"]: e["outcome"] for e in events_of(tmp_path) if e["event"] == "point"}
    assert list(outcomes) == [4, 8, *(2**power for power in range(4, 14)), 2, 1]
    fitting = [micro for micro, outcome in outcomes.items() if outcome == "ok"]
    assert 16 <= max(fitting) < 4096  # what the memory holds, however slow
    assert all(outcome == ("ok" if micro <= max(fitting) else "oom") for micro, outcome in outcomes.items())


def test_sizes_are_timed_in_turns(tmp_path: Path) -> None:
    """Visits of four steps; sizes that are not far slower than the best again, and the first of them at the end."""
    run_distributed(measure, 1, str(tmp_path), None, points=((4, 2), (8, 1), (1, 64)), steps=8, precision=0.0)
    steps = [e["micro"] for e in events_of(tmp_path) if e["event"] == "step"]
    visits = steps[::4]
    assert steps == [micro for micro in visits for _ in range(4)]
    assert visits[:3] == [4, 8, 1]
    again = visits[3:]
    several = len(set(again)) > 1
    assert len(again) == len(set(again)) + several  # 8 steps are two visits
    assert again[-1] == again[0]


def test_survey_measures_activations_and_operations(tmp_path: Path) -> None:
    run_distributed(measure, 2, str(tmp_path), None, survey=True, points=((4, 2),))
    found = next(e for e in events_of(tmp_path) if e["event"] == "survey")
    assert found["plain"]["3"] > found["plain"]["1"]
    machine = next(e for e in events_of(tmp_path) if e["event"] == "machine")
    assert machine["levels"].keys() == {"compute", "copy", "communication"}
    # forward of each linear layer, and in backward the gradients of its weight and of its input (the first block's
    # input needs none)
    blocks, head = TOKENS * DEPTH * HIDDEN * HIDDEN, HIDDEN * 4
    assert found["flops"] == 2 * (3 * (blocks + head) - TOKENS * HIDDEN * HIDDEN)
    assert found["bandwidth"] > 0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_inputs_of_adapters_require_gradients_only_while_blocks_are_checkpointed(own: bool, on: bool) -> None:
    """Else gradients go through the first block, which they do not in a script that starts without checkpointing."""
    small = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
    model = LlamaForCausalLM(small).train()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    if own:
        model.enable_input_require_grads()
    if on:
        model.gradient_checkpointing_enable()
    alone = own and not on  # where both were there at the start nobody knows whose they are
    expected = [alone, True, alone, True, alone]
    engine: Any = SimpleNamespace(module=model)
    for wanted, requires in zip((False, True, False, True, False), expected, strict=True):
        set_checkpointing(engine, wanted)
        embedded = model.get_input_embeddings()(torch.tensor([[1, 2]]))
        assert embedded.requires_grad == requires


def test_output_without_loss_times_the_scripts_own_steps(tmp_path: Path) -> None:
    run_distributed(measure, 1, str(tmp_path), None, model=Bare, points=((4, 2),), natural_steps=2)
    events = events_of(tmp_path)
    assert any(e["event"] == "note" and e.get("resizable") is False for e in events)
    assert len([e for e in events if e["event"] == "step"]) == 2


def longest(folder: str) -> list[int]:
    """A data set of texts of many lengths; the script's first batch has short ones."""
    texts = [
        {"x": torch.randn(HIDDEN), "labels": torch.tensor(1), "text": [0] * (5 if i == 40 else 2)} for i in range(64)
    ]
    engine = make_engine(1)
    attach(engine, requested(folder, points=((2, 4),)))

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["text"]) for row in rows)
        x = torch.stack([row["x"] for row in rows])
        return {"x": x[:, None].repeat(1, width, 1), "labels": torch.stack([row["labels"] for row in rows])}

    loader = torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    for batch in loader:
        engine.backward(engine(**batch)["loss"])
        engine.step()
    return [1]


def test_memory_is_checked_with_the_longest_samples(tmp_path: Path) -> None:
    run_distributed(longest, 1, str(tmp_path))
    point = next(e for e in events_of(tmp_path) if e["event"] == "point")
    assert point["longest"]


class Slow(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A sample takes 10 ms."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.01)
        return {"x": torch.full((TOKENS, HIDDEN), float(index)), "labels": torch.tensor(1)}

    def __len__(self) -> int:
        return 64


def waits(folder: str) -> bool:
    """Whether the loader's class is as it was afterwards."""
    before = _BaseDataLoaderIter.__next__
    engine = make_engine(1)
    attach(engine, requested(folder, natural_steps=3))
    for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):
        engine.backward(engine(**batch)["loss"])
        engine.step()
    return _BaseDataLoaderIter.__next__ is before


def test_waiting_for_data_is_measured(tmp_path: Path) -> None:
    """Two micro-batches of four samples a step, 10 ms each, loaded by the process itself."""
    assert run_distributed(waits, 1, str(tmp_path)) == [True]
    steps = [event for event in events_of(tmp_path) if event["event"] == "step"]
    assert len(steps) == 3
    for step in steps:
        assert 0.08 <= step["wait"] <= step["seconds"] + 0.01


def test_an_engine_outside_of_trials_is_untouched() -> None:
    def check() -> None: ...

    assert run_distributed(untouched, 1) == [True]


def untouched() -> bool:
    engine = make_engine(0)
    return not engine.events.watched and not engine.step_hooks


def test_tensor_meter_counts_what_lives() -> None:
    assert run_distributed(count_bytes, 1) == [True]


def count_bytes() -> bool:
    engine = make_engine(0)
    meter = TensorMeter(engine, None)
    base = meter.at_rest()
    found: list[int] = []
    with meter.watch(found):
        a = torch.zeros(1000)
        del a
        b = torch.ones(2000) + 1  # two of them at once
        view = b[10:]
        del b
        c = torch.zeros(500)
    del view, c
    return found == [base + 2 * 2000 * 4]


def test_request_survives_its_file(tmp_path: Path) -> None:
    request = TrialRequest(events="e", points=((1, 2), (3, 4)), memory_limit=5, best=0.1)
    request.write(tmp_path / "request.json")
    assert TrialRequest.read(tmp_path / "request.json") == request
    assert json.loads((tmp_path / "request.json").read_text())["points"] == [[1, 2], [3, 4]]


def short_training(folder: str, steps: int, save: bool) -> None:
    """In a process of its own: the trial ends it."""
    torch.set_num_threads(1)
    engine = make_engine(1)
    attach(engine, TrialRequest(f"{folder}/events.jsonl", natural_steps=6, points=((4, 2),), steps=4))
    engine.save_checkpoint(f"{folder}/before")
    train(engine, 2 * steps)
    if save:
        torch.save(engine.module.state_dict(), f"{folder}/model.pt")
    os._exit(3)  # never reached where it saves


def test_a_script_that_would_save_ends_before(tmp_path: Path) -> None:
    """Training is shorter than what was to be timed. What was timed counts, and the user's files stay."""
    (tmp_path / "model.pt").write_bytes(b"the user's")
    steps = 4
    process = multiprocessing.get_context("forkserver").Process(
        target=short_training, args=(str(tmp_path), steps, True)
    )
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert (tmp_path / "model.pt").read_bytes() == b"the user's"
    assert not (tmp_path / "before").exists()
    events = events_of(tmp_path)
    assert [e["event"] for e in events][-2:] == ["note", "done"]
    assert len([e for e in events if e["event"] == "step" and e["kind"] == "natural"]) == steps - 1
    assert f"{steps - 1} of the script's own steps were timed, before save()" in events[-2]["text"]


def two_engines(folder: str) -> None:
    """In a process of its own: the trial ends it."""
    torch.set_num_threads(1)
    request = TrialRequest(f"{folder}/events.jsonl", natural_steps=3, points=((4, 2),), steps=4)
    engines = [make_engine(1), make_engine(1)]
    for engine in engines:
        attach(engine, request)
    for index in range(20):
        for engine in engines:
            train(engine, 1, index)


def test_of_several_engines_the_script_s_steps_are_timed(tmp_path: Path) -> None:
    """A replay of one would leave out the other: none is made, and steps are those of the first."""
    process = multiprocessing.get_context("forkserver").Process(target=two_engines, args=(str(tmp_path),))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    events = events_of(tmp_path)
    assert not [e for e in events if e["event"] in ("point", "survey")]
    assert [e["kind"] for e in events if e["event"] == "step"] == ["natural"] * 3
    assert [(e["resizable"], "2 engines" in e["text"]) for e in events if e["event"] == "note"] == [(False, True)]
    assert events[-1]["event"] == "done"
