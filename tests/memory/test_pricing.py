"""Bytes of a hand-made timeline: two buffers, every stage, offload and accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ds_hf.config import load_config
from ds_hf.config.plan import plan_states
from ds_hf.engine.optim import stream_share
from ds_hf.engine.zero.planning import BufferSpec
from ds_hf.memory import Predictor, Workload
from ds_hf.memory.prediction import Prediction
from ds_hf.memory.pricing import CUBLAS, NCCL, Costs, price
from ds_hf.memory.timeline import Event, Step, Timeline

N = 1 << 20  # elements of each of the two buffers; 2 bytes each
MB = 1 << 20
ALONE = Costs(
    world_size=1,
    moments=2,
    accumulation_steps=1,
    whole_step=False,
    optimizer_place="device",
    parameter_place="device",
    pinned=True,
)


def timeline(*, sharded: bool) -> Timeline:
    """Backward of the second buffer, then of the first: 2 MB of gradient each, 6 MB of activations before them."""
    specs = [BufferSpec(name, (torch.Size([N]),), torch.bfloat16, True, sharded) for name in ("a", "b")]
    found = Timeline(specs, constants=0)

    def step(event: Event, buffer: int, activations: int, gradients: int) -> None:
        live = (activations * MB, 0, gradients * MB, 0)
        found.steps.append(Step(event, buffer, live, live))

    step(Event.START, -1, 0, 0)
    for buffer, activations in ((0, 3), (1, 6)):
        if sharded:
            step(Event.GATHER, buffer, activations - 3, 0)
            step(Event.RELEASE, buffer, activations, 0)
    step(Event.BACKWARD, -1, 6, 0)
    for buffer, activations in ((1, 4), (0, 0)):
        if sharded:
            step(Event.GATHER, buffer, activations + 2, 0)
        step(Event.COLLECT, buffer, activations, 2)
        step(Event.REDUCE, buffer, activations, 0)
        if sharded:
            step(Event.RELEASE, buffer, activations, 0)
    return found


def priced(stage: int, costs: Costs = ALONE, **zero: Any) -> Prediction:
    config = load_config({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}, check_batch=False)
    return price(timeline(sharded=stage == 3), plan_states(config), costs, micro_batch=1)


def parts(prediction: Prediction) -> dict[str, int]:
    """In MB, without the workspaces."""
    assert prediction.device["workspaces"] == CUBLAS
    return {name: nbytes // MB for name, nbytes in prediction.device.items() if name != "workspaces"}


@pytest.mark.parametrize(
    ("stage", "world_size", "expected"),
    [
        # collect of the second buffer: 2 MB in .grad, 2 MB flat
        (0, 1, {"parameters": 4, "masters": 8, "moments": 16, "gradients": 4, "activations": 4}),
        (0, 4, {"parameters": 4, "masters": 8, "moments": 16, "gradients": 4, "activations": 4}),
        (1, 4, {"parameters": 4, "masters": 2, "moments": 4, "gradients": 4, "activations": 4}),
        (2, 4, {"parameters": 4, "masters": 2, "moments": 4, "gradients": 4, "activations": 4}),
        (3, 4, {"parameters": 1, "masters": 2, "moments": 4, "gathered units": 2, "gradients": 4, "activations": 4}),
        # gathered units of one process are its shards
        (3, 1, {"parameters": 4, "masters": 8, "moments": 16, "gradients": 4, "activations": 4}),
    ],
)
def test_stages(stage: int, world_size: int, expected: dict[str, int]) -> None:
    prediction = priced(stage, dataclasses.replace(ALONE, world_size=world_size))
    assert parts(prediction) == expected
    assert prediction.moment == "backward"
    assert ("NCCL" in prediction.outside) == (world_size > 1)
    assert prediction.outside.get("NCCL", NCCL) == NCCL
    assert prediction.device_total == prediction.device_peak + sum(prediction.outside.values())


def test_sums_over_micro_batches() -> None:
    """fp32: 4 MB a buffer, all processes' own at stage 1, shares of a quarter at stage 2."""
    costs = dataclasses.replace(ALONE, world_size=4, accumulation_steps=4)
    one, two = priced(1, costs), priced(2, costs)
    # the last micro-batch's reduction: both sums, one of them once more in bf16, and a quarter of that
    assert parts(one)["gradients"] + parts(one)["activations"] + parts(one).get("temporary", 0) == 4 + 4 + 4 + 2
    # .grad, flat, and both shards' sums
    assert parts(two)["gradients"] == 2 + 2 + 1 + 1


def test_optimizer_on_the_host() -> None:
    costs = dataclasses.replace(ALONE, world_size=4, optimizer_place="cpu")
    prediction = priced(2, costs, offload_optimizer={"device": "cpu"})
    assert parts(prediction) == {"parameters": 4, "gradients": 4, "activations": 4}
    host = {name: nbytes / MB for name, nbytes in prediction.host.items()}
    assert host == {"loading": 4, "masters": 2, "moments": 4, "gradients": 1}
    assert prediction.pinned == 7 * MB
    assert prediction.host_total == 7 * MB
    assert prediction.disk_total == 0


def test_a_share_of_the_states_stays_on_the_device() -> None:
    """The first buffer's, as far as whole buffers fit the share; its reduced gradient stays as well."""
    costs = dataclasses.replace(ALONE, world_size=4, optimizer_place="cpu", device_share=0.6)
    prediction = priced(2, costs, offload_optimizer={"device": "cpu"})
    assert parts(prediction) == {"parameters": 4, "masters": 1, "moments": 2, "gradients": 4, "activations": 4}
    host = {name: nbytes / MB for name, nbytes in prediction.host.items()}
    assert host == {"loading": 4, "masters": 1, "moments": 2, "gradients": 0.5}
    everything = dataclasses.replace(costs, device_share=1.0)
    assert priced(2, everything, offload_optimizer={"device": "cpu"}).host.keys() == {"loading"}
    # parameters that are not on the device keep their states away from it
    away = dataclasses.replace(everything, parameter_place="cpu")
    both = priced(3, away, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert "masters" not in both.device


def test_chosen_columns_are_on_the_device_beside_all_states_on_the_host() -> None:
    """ZenFlow with half of half a million elements: 20 bytes each there, and 8 of each of all on the host."""
    costs = dataclasses.replace(ALONE, world_size=4, optimizer_place="cpu", chosen=0.5)
    prediction = priced(2, costs, offload_optimizer={"device": "cpu"})
    assert parts(prediction) == {"parameters": 4, "gradients": 4, "activations": 4, "chosen columns": 5}
    host = {name: nbytes / MB for name, nbytes in prediction.host.items()}
    assert host == {"loading": 4, "masters": 2, "moments": 4, "gradients": 1, "gradients that wait": 4}
    away = priced(2, dataclasses.replace(costs, chosen_on_host=True), offload_optimizer={"device": "cpu"})
    assert parts(away)["chosen columns"] == 2
    assert away.host["gradients that wait"] == 7 * MB


def test_ratio_of_the_file() -> None:
    model = "llama:hidden=64,layers=4,heads=4,kv_heads=4,intermediate=172,vocab=512"
    predictor = Predictor(model, Workload(micro_batch=1, seq_len=32))

    def masters(**zero: Any) -> tuple[int, int]:
        offload = {"device": "cpu", **zero}
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
        found = predictor.predict(config)
        return found.device.get("masters", 0), found.host.get("masters", 0)

    whole = masters()[1]
    here, away = masters(ratio=0.5)
    assert masters()[0] == 0
    assert 2 * here + away == pytest.approx(whole, rel=1e-2)  # those on the device are split
    assert 0 < here <= 0.25 * whole


def test_states_that_the_gpu_updates_pass_over_the_device() -> None:
    """Two slots of 12 MB of states for one of the two buffers, and 2 MB of gradients that wait for them, 4 of sums."""
    alone = dataclasses.replace(ALONE, optimizer_place="cpu")

    def found(**changed: Any) -> Prediction:
        return priced(2, dataclasses.replace(alone, **changed), offload_optimizer={"device": "cpu"})

    def slots(**changed: Any) -> int:
        return found(**changed).device.get("states on their way", 0) // MB

    assert slots() == 0
    assert slots(streamed_share=0.3) == 2 * 12
    assert slots(streamed_share=0.3, split_masters=True) == 2 * 10
    assert slots(streamed_share=0.3, world_size=4) == 2 * 12 / 4
    assert slots(streamed_share=0.3, accumulation_steps=4) == 2 * 12
    small = 16 * 25 * MB  # no room for a gradient: it comes up with the states
    assert slots(streamed_share=0.3, device_memory=small) == 2 * (12 + 2)
    assert slots(streamed_share=0.3, device_memory=small, accumulation_steps=4) == 2 * (12 + 4)
    assert slots(streamed_share=1.0, device_share=1.0) == 0
    assert slots(streamed_share=1.0, optimizer_place="device") == 0

    def host(**changed: Any) -> tuple[int, int]:
        return tuple(found(**changed).host[name] // MB for name in ("masters", "gradients"))  # type: ignore[return-value]

    assert host() == (8, 4)
    assert host(streamed_share=0.3) == (8, 2)
    assert host(streamed_share=0.3, split_masters=True) == (6, 2)
    assert host(streamed_share=0.3, split_masters=True, device_memory=16 * 21 * MB) == (6, 4)
    stays, goes = (found(streamed_share=0.3, device_memory=m, accumulation_steps=4) for m in (80 << 30, small))
    assert stays.device["gradients"] - goes.device["gradients"] == 4 * MB  # the sum


def test_auto_is_priced_by_the_engines_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = dataclasses.replace(ALONE, optimizer_place="cpu", streamed_share="auto")

    def streamed(**changed: Any) -> tuple[float, int]:
        prediction = priced(2, dataclasses.replace(auto, **changed), offload_optimizer={"device": "cpu"})
        return prediction.streamed_share, prediction.device.get("states on their way", 0) // MB

    assert streamed() == (0.0, 0)  # 24 MiB of states
    monkeypatch.setattr(stream_share, "LEAST_STATES", 24 * MB)
    assert streamed() == (0.3, 24)
    assert streamed(device_memory=16 * 28 * MB) == (0.3, 24)
    assert streamed(device_memory=16 * 26 * MB - 1) == (0.0, 0)
    assert streamed(world_size=2) == (0.0, 0)
    monkeypatch.setattr(stream_share, "LEAST_STATES", 10 * MB)
    assert streamed(split_masters=True) == (0.6, 20)
    assert streamed(split_masters=True, world_size=2) == (1.0, 10)


@pytest.mark.parametrize(
    ("own", "zero", "optimizer", "share"),
    [
        ({}, {}, "AdamW", 0.6),
        ({"stream": "auto"}, {}, "AdamW", 0.6),
        ({"stream": 0.0}, {}, "AdamW", 0.0),
        ({"stream": 0.5}, {"pin_memory": False}, "AdamW", 0.5),
        ({}, {"pin_memory": False}, "AdamW", 0.0),
        ({"delayed": True}, {}, "AdamW", 0.0),
        ({}, {}, "Lamb", 0.0),
        ({}, {}, "Adafactor", 0.0),
    ],
)
def test_stream_of_the_file(own: dict[str, Any], zero: dict[str, Any], optimizer: str, share: float) -> None:
    """Of a model of 7 M parameters: 80 MiB of states."""
    model = "llama:hidden=256,layers=8,heads=4,kv_heads=4,intermediate=688,vocab=1024"
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **zero}},
        "ds_hf": {"offload": own},
    }
    predictor = Predictor(model, Workload(micro_batch=1, seq_len=32, optimizer=optimizer))
    found = predictor.predict(config)
    assert found.streamed_share == share
    assert ("states on their way" in found.device) == (share > 0)
    if share and "stream" not in own:
        assert predictor.predict(config, device_memory=1 << 28).streamed_share == 0
        predictor.streams = False  # a CPU
        assert predictor.predict(config).streamed_share == 0


def test_everything_elsewhere() -> None:
    costs = dataclasses.replace(ALONE, world_size=4, optimizer_place="nvme", parameter_place="nvme")
    prediction = priced(3, costs, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert {name: nbytes / MB for name, nbytes in prediction.disk.items()} == {
        "masters": 2,
        "moments": 4,
        "parameters": 1,
    }
    assert "parameters" not in prediction.device
    assert prediction.host["gradients"] == MB
    assert prediction.host["moments on their way"] == 2 * 2 * MB  # two buffers, of half the moments each


def test_an_optimizer_that_steps_as_a_whole_wants_wide_gradients() -> None:
    narrow, wide = priced(0), priced(0, dataclasses.replace(ALONE, whole_step=True))
    assert narrow.device_peak - CUBLAS == 36 * MB
    assert wide.moment == "step"
    assert wide.device_peak - CUBLAS == (4 + 8 + 16 + 4 + 8) * MB
