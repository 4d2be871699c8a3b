"""The predictor: what changes with stage, micro-batch and workload, and that it is quick."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ds_hf.errors import ConfigError
from ds_hf.memory import Predictor, UnpredictableError, Workload, predict
from tests.helpers.models import TinyLM

TINY = "llama:hidden=64,layers=4,heads=4,kv_heads=4,intermediate=176,vocab=512"
BF16 = {"bf16": {"enabled": True}}


def stage(number: int, **keys: Any) -> dict[str, Any]:
    return BF16 | {"zero_optimization": {"stage": number}} | keys


@pytest.fixture(scope="module")
def tiny() -> Predictor:
    return Predictor(TINY, Workload(seq_len=128))


def test_each_stage_takes_less(tiny: Predictor) -> None:
    peaks = [tiny.predict(stage(number), world_size=8).device_peak for number in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[1]
    assert peaks[2] > peaks[3]


def test_the_micro_batch_of_the_configuration_goes_first(tiny: Predictor) -> None:
    given = stage(2, train_micro_batch_size_per_gpu=4)
    assert tiny.predict(given).micro_batch == 4
    assert tiny.predict(given, micro_batch=2).micro_batch == 2
    assert tiny.predict(stage(2)).micro_batch == 1
    total = stage(2, train_batch_size=32, gradient_accumulation_steps=2)
    assert tiny.predict(total, world_size=4).micro_batch == 4


def test_the_largest_micro_batch_fits_and_one_more_does_not(tiny: Predictor) -> None:
    room = tiny.predict(stage(2), micro_batch=37).device_total + 1000
    largest = tiny.largest_micro_batch(stage(2), device_memory=room)
    assert largest == 37
    assert tiny.predict(stage(2), micro_batch=largest).device_total <= room
    assert tiny.predict(stage(2), micro_batch=largest + 1).device_total > room
    assert tiny.largest_micro_batch(stage(2), device_memory=room, exact=False) in (35, 36, 37)
    assert tiny.largest_micro_batch(stage(2), device_memory=1 << 20) == 0


def test_checkpointing_and_attention() -> None:
    def peak(**changes: Any) -> int:
        return predict(TINY, stage(2), Workload(micro_batch=4, seq_len=512, **changes)).device_peak

    plain = peak()
    assert peak(gradient_checkpointing=True) < plain
    # at least the probabilities of each layer, kept in bf16
    assert peak(attention="eager") > plain + 4 * (4 * 4 * 512 * 512 * 2)


def test_held_outputs_are_logits(tiny: Predictor) -> None:
    held = Predictor(TINY, Workload(micro_batch=16, seq_len=128, keeps_outputs=True)).predict(stage(2))
    freed = tiny.predict(stage(2), micro_batch=16)
    assert held.device["logits and loss"] - freed.device["logits and loss"] == 16 * 128 * 512 * 2


def test_frozen_parameters_have_no_states() -> None:
    model = TinyLM(width=256, vocab=512, tied=False)
    inputs = {"tokens": torch.zeros(2, 16, dtype=torch.long)}
    every = predict(model, stage(0), Workload(inputs=inputs))
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    some = predict(model, stage(0), Workload(inputs=inputs))
    frozen = sum(p.numel() for p in model.blocks.parameters())
    assert every.device["parameters"] - some.device["parameters"] in range(4096)  # gaps
    assert every.device["moments"] - some.device["moments"] == pytest.approx(8 * frozen, abs=8192)


@pytest.mark.parametrize(("name", "tensors"), [("AdamW", 2), ("Lion", 1), ("SGD", 0), ("Adagrad", 1)])
def test_optimizers(tiny: Predictor, name: str, tensors: int) -> None:
    config = stage(2, optimizer={"type": name, "params": {"lr": 0.1}})
    split, whole = tiny.predict(config), tiny.predict({**config, "ds_hf": {"split_masters": False}})
    assert whole.device.get("moments", 0) == tensors * whole.device["masters"] == split.device.get("moments", 0)
    assert 2 * split.device["masters"] - whole.device["masters"] in range(4096)  # gaps


def test_masters_that_cannot_be_halves(tiny: Predictor) -> None:
    for config in (
        stage(2, optimizer={"type": "Lamb", "params": {"lr": 0.1}}),
        {**stage(2), "bf16": {"enabled": False}, "fp16": {"enabled": True}},
    ):
        whole = {**config, "ds_hf": {"split_masters": False}}
        assert tiny.predict(config).device["masters"] == tiny.predict(whole).device["masters"]


def test_faults_are_named(tiny: Predictor) -> None:
    with pytest.raises(ConfigError, match="stage"):
        tiny.predict({"zero_optimization": {"stage": 7}})

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[x.nonzero()[:, 0]]).sum()

    with pytest.raises(UnpredictableError, match="Looks does not run without values"):
        predict(Looks(), {}, Workload(inputs={"x": torch.zeros(2, 4)}))


@pytest.mark.slow
def test_seventy_billion_parameters_within_seconds() -> None:
    llama = "llama:hidden=8192,layers=80,heads=64,kv_heads=8,intermediate=28672,vocab=128256"
    start = time.process_time()
    predictor = Predictor(llama, Workload(seq_len=4096, gradient_checkpointing=True))
    prediction = predictor.predict(stage(3), world_size=64)
    assert time.process_time() - start < 30
    assert sum(p.numel() for p in predictor.model.parameters()) == pytest.approx(70.55e9, rel=0.001)
    assert prediction.device["masters"] == pytest.approx(2 * 70.55e9 / 64, rel=0.001)
