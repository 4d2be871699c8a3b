"""Bytes of settings by a trace of the model, where the first launch said which model it is."""

from __future__ import annotations

import json
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest
from transformers import LlamaConfig

from ds_hf.autotune.cost import HOST_UPDATE, CostModel, Survey
from ds_hf.autotune.footprint import Footprint, RefusedError, TracedAhead
from ds_hf.engine.optim import stream_share
from ds_hf.errors import ConfigError, Fault
from ds_hf.memory import Predictor, UnpredictableError, Workload, predict
from tests.autotune.world import MIB

SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
SIZES = [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
LENGTH = 64


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Of the engine of a small Llama on two devices, as it writes them."""
    config = LlamaConfig(**SHAPE)
    numel = 512 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    model = {"class": "LlamaForCausalLM", "config": json.loads(config.to_json_string(False)), "attention": "sdpa"}
    return {"total": numel, "trainable": numel, "largest_unit": numel // 3, "module_dtype": "float32", "world_size": 2,
            "micro": 1, "accumulation": 16, "optimizer": "FusedAdam", "cuda": True, "can_checkpoint": True,
            "checkpointing": False, "model": model, "host_memory": 2**40}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The survey of the same: a batch of one sample."""
    inputs = {name: ([1, LENGTH], "int64") for name in ("input_ids", "labels")}
    return {"inputs": inputs, "bandwidth": 1e9}


@pytest.fixture(scope="module")
def footprint(facts: dict[str, Any], found: dict[str, Any]) -> Footprint:
    return Footprint(facts, found, SIZES)


def tree(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sizes_between_are_interpolated(footprint: Footprint, stage: int) -> None:
    config = {**tree(stage), "gradient_accumulation_steps": 2, "bf16": {"enabled": False}}
    for micro in (1, 4, 16):
        workload = Workload(micro, LENGTH, gradient_checkpointing=False, attention="sdpa", optimizer="FusedAdam")
        expected = predict(LlamaConfig(**SHAPE), config, workload, world_size=2)
        traced = footprint.predict(tree(stage), micro, 2, checkpointing=False)
        assert traced.device_peak == pytest.approx(expected.device_peak, rel=0.0 if micro != 4 else 0.01)


def test_precision_left_to_auto_is_what_the_engine_said(facts: dict[str, Any], found: dict[str, Any]) -> None:
    traced = Footprint({**facts, "module_dtype": "bfloat16"}, found, SIZES).predict(tree(1), 1, 1, checkpointing=False)
    assert traced.device["masters"] == pytest.approx(facts["total"] * 2 / 2, rel=0.02)  # halves, of two devices


def test_what_is_not_known_is_not_predicted(facts: dict[str, Any], found: dict[str, Any]) -> None:
    for changed in ({"model": None}, {"total": 1}, {"trainable": 1}, {"model": {**facts["model"], "class": "Mine"}}):
        with pytest.raises(UnpredictableError):
            Footprint({**facts, **changed}, found, SIZES)
    with pytest.raises(UnpredictableError, match="not known by name"):
        Footprint(facts, {**found, "inputs": None}, SIZES)


def test_the_cost_model_is_right_where_it_measured_and_near_elsewhere(
    facts: dict[str, Any], found: dict[str, Any], footprint: Footprint
) -> None:
    """What the script takes beyond the trace is expected at other stages and sizes too."""
    facts = {**facts, "cuda": False}
    own = {"zero_optimization.stage": 3}
    peaks = {m: footprint.predict(tree(3), m, s, checkpointing=False).device_peak for m, s in SIZES[:3]}
    peaks = {micro: peak + 5 * MIB for micro, peak in peaks.items()}
    points = {micro: (1.0, steps, 0.1, peaks[micro]) for micro, steps in SIZES[:3]}
    model = CostModel(tree(3), own, Survey(facts, found, points), 64 * MIB, footprint)
    for micro, steps in SIZES[:3]:
        assert model.nbytes(own, micro, steps) == peaks[micro]
    for stage in (0, 1, 2, 3):
        traced = footprint.predict(tree(stage), 16, 1, checkpointing=False)
        assert model.nbytes({"zero_optimization.stage": stage}, 16, 1) == traced.device_peak + 5 * MIB


def test_host_memory_rules_offload_out(facts: dict[str, Any], found: dict[str, Any], footprint: Footprint) -> None:
    own = {"zero_optimization.stage": 2, "zero_optimization.offload_optimizer.device": "none"}
    away = {**own, "zero_optimization.offload_optimizer.device": "cpu"}
    model = CostModel(tree(2), own, Survey({**facts, "host_memory": 0.5 * MIB}, found), 2**40, footprint)
    assert not model.why_not(own, 1, 16)
    assert "of host memory" in model.why_not(away, 1, 16)
    roomy = CostModel(tree(2), own, Survey(facts, found), 2**40, footprint)
    assert not roomy.cannot_fit(away, 1, 16)


def test_settings_that_the_engine_refuses_are_ruled_out(
    facts: dict[str, Any], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts that the model's plan divides among processes that share layers, where they would be divided twice."""
    traced, predict_each = Footprint(facts, found, SIZES), Predictor.predict_each

    def refuse(self: Predictor, settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if settings["zero_optimization"]["stage"] == 3:
            raise ConfigError([Fault("", "the plan divides the experts", "remove expert_parallel")])
        return predict_each(self, settings, *args, **kwargs)

    monkeypatch.setattr(Predictor, "predict_each", refuse)
    traced.trace_all([(tree(3), False), (tree(2), False)])  # goes on after what is refused
    assert traced.thread is not None
    traced.thread.join()
    assert len(traced._known) == 4
    own, other = {"zero_optimization.stage": 2}, {"zero_optimization.stage": 3}
    model = CostModel(tree(2), own, Survey(facts, found), 2**40, traced)
    assert (model.why_not(own, 1, 16), model.why_not(other, 1, 16)) == ("", "the plan divides the experts")
    assert model.nbytes(other, 1, 16) > 0
    with pytest.raises(RefusedError, match="the plan divides the experts"):
        traced.predict(tree(3), 1, 1, checkpointing=False)


def test_states_that_the_gpu_updates_take_no_time_of_the_cpu(
    facts: dict[str, Any], found: dict[str, Any], footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"zero_optimization.stage": 2, "zero_optimization.offload_optimizer.device": "none"}
    away = {**own, "zero_optimization.offload_optimizer.device": "cpu"}

    def update(stream: Any) -> float:
        whole = {**tree(2), "ds_hf": {"offload": {"stream": stream}}}
        model = CostModel(whole, own, Survey(facts, found), 2**40, Footprint(facts, found, SIZES))
        return model._update(away, 1, 16)

    none, some = update(0.0), update(0.3)
    owned = facts["total"] / 2
    assert none - some == pytest.approx(0.3 * owned / HOST_UPDATE)
    assert update("auto") == none  # less than 64 MiB of states
    monkeypatch.setattr(stream_share, "LEAST_STATES", 1)
    assert none > update("auto") > 0
    facts = {**facts, "memory": 1 << 20}
    assert update("auto") == none  # slots would take more than a part of that device


def settings() -> list[tuple[dict[str, Any], bool]]:
    return [({**tree(stage), "$schema": "x"}, on) for stage in (2, 3) for on in (False, True)]


def test_traced_while_the_first_launch_goes_on(
    facts: dict[str, Any], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = TracedAhead(lambda told: (SIZES, settings()))
    ahead.on_event({"event": "facts", **facts})
    assert ahead.take() is None
    ahead.on_event({"event": "survey", **found})
    traced = ahead.take()
    assert traced is not None
    assert ahead.take() is None
    assert traced.thread is not None
    traced.thread.join()
    now = Footprint(facts, found, SIZES)
    expected = [now.predict(each, 4, 4, checkpointing=on).device for each, on in settings()]
    monkeypatch.setattr(Predictor, "predict_each", None)  # nothing is traced any more
    assert [traced.predict(each, 4, 4, checkpointing=on).device for each, on in settings()] == expected


def test_nobody_waits_for_what_is_traced_meanwhile(
    facts: dict[str, Any], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own setting is there, the others when the thread is through with them, or by what time is left."""
    may, predict_each = Event(), Predictor.predict_each

    def slow(*args: Any, **more: Any) -> Any:
        assert current_thread() is main_thread() or may.wait(60)
        return predict_each(*args, **more)

    traced = Footprint(facts, found, SIZES)
    (own, *_, last) = settings()
    expected = traced.predict(own[0], 4, 4, checkpointing=own[1]).device
    monkeypatch.setattr(Predictor, "predict_each", slow)
    traced.trace_all(settings())
    assert traced.predict(own[0], 4, 4, checkpointing=own[1]).device == expected
    with pytest.raises(UnpredictableError, match="not traced yet"):
        traced.predict(last[0], 4, 4, checkpointing=last[1])
    may.set()
    assert traced.thread is not None
    traced.thread.join()
    assert traced.predict(last[0], 4, 4, checkpointing=last[1]).device
    other, traced.seconds = tree(2, reduce_bucket_size=12345), 0.0
    with pytest.raises(UnpredictableError, match="not traced yet"):
        traced.predict(other, 4, 4, checkpointing=False)
    traced.seconds = 60.0
    assert traced.predict(other, 4, 4, checkpointing=False).device
    assert traced.seconds < 60


def test_a_search_that_ends_ends_what_traces(
    facts: dict[str, Any], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the setting that it is at; a thread left to the end of Python is cut off inside torch, which aborts."""
    begun, may, predict_each, calls = Event(), Event(), Predictor.predict_each, []

    def slow(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:  # the first is the user's own setting
            begun.set()
            assert may.wait(60)
        return predict_each(*args, **more)

    monkeypatch.setattr(Predictor, "predict_each", slow)
    ahead = TracedAhead(lambda told: (SIZES, settings()))
    ahead.on_event({"event": "facts", **facts})
    ahead.on_event({"event": "survey", **found})
    traced = ahead.take()
    assert traced is not None
    assert begun.wait(60)
    Thread(target=lambda: traced._stopped.wait(60) and may.set()).start()
    ahead.close()
    assert traced.thread is not None
    assert not traced.thread.is_alive()
    assert len(calls) == 2
    assert not any(thread.daemon for thread in (traced.thread, ahead._thread) if thread)


def test_nothing_is_traced_ahead_without_a_gpu(facts: dict[str, Any], found: dict[str, Any]) -> None:
    ahead = TracedAhead(lambda told: (SIZES, settings()))
    ahead.on_event({"event": "facts", **facts, "cuda": False})
    ahead.on_event({"event": "survey", **found})
    assert ahead.take() is None


def test_what_keeps_from_tracing_is_said_to_who_asks(facts: dict[str, Any], found: dict[str, Any]) -> None:
    ahead = TracedAhead(lambda told: (SIZES, settings()))
    ahead.on_event({"event": "facts", **facts, "model": None})
    ahead.on_event({"event": "survey", **found})
    with pytest.raises(UnpredictableError, match="not one that transformers builds"):
        ahead.take()
