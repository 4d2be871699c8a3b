"""The predictor: what changes with stage, micro-batch and workload, and that it is quick."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf.errors import ConfigError
from ds_hf.memory import Predictor, UnpredictableError, Workload, predict
from ds_hf.memory.models import build
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


def test_weights_in_few_bits() -> None:
    """Of what is frozen: half a byte a weight, and a scale of 4 bytes for 64."""
    model = build("llama:hidden=64,layers=2,heads=4,vocab=96", Workload())
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    named = [(n, p) for n, p in model.named_parameters() if "_proj" in n]
    four = {"weight_quantization": {"post_init_quant": {"_proj": {"num_bits": 4}}}}
    predictor = Predictor(model, Workload(micro_batch=1, seq_len=8))
    for number in (1, 3):
        before, after = (predictor.predict({**stage(number), **more}).device["parameters"] for more in ({}, four))
        saved = sum(p.numel() * 2 - p.shape[0] * (p.shape[1] // 2 + 4 * -(-p.shape[1] // 64)) for _, p in named)
        assert before - after == pytest.approx(saved, rel=0.02)


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


def test_the_longest_sequence_fits_and_one_more_step_does_not() -> None:
    predictor = Predictor(TINY, Workload(seq_len=512, gradient_checkpointing=True))
    room = predictor.predict(stage(2)).device_total + (300 << 20)
    longest = predictor.longest_sequence(stage(2), device_memory=room)
    assert longest > 512
    assert longest % 256 == 0
    for length, fits in ((longest, True), (longest + 256, False)):
        other = Predictor(TINY, Workload(seq_len=length, gradient_checkpointing=True))
        assert (other.predict(stage(2)).device_total <= room) is fits
    rough = predictor.longest_sequence(stage(2), device_memory=room, exact=False)
    assert rough == pytest.approx(longest, rel=0.02)
    assert predictor.longest_sequence(stage(2), device_memory=1 << 20) == 0
    halved = predictor.longest_sequence(stage(2), micro_batch=2, device_memory=room)
    assert halved == pytest.approx(longest / 2, rel=0.02)


@pytest.mark.slow
def test_scores_of_eager_attention_bound_the_length() -> None:
    """Where memory grows with the square of the sequence."""
    predictor = Predictor(TINY, Workload(attention="eager"))
    room = 3 << 30
    longest = predictor.longest_sequence(stage(2), device_memory=room)
    for length, fits in ((longest, True), (longest + 256, False)):
        other = Predictor(TINY, Workload(seq_len=length, attention="eager"))
        assert (other.predict(stage(2)).device_total <= room) is fits


def test_processes_that_share_sequences() -> None:
    predictor = Predictor(TINY, Workload(seq_len=4096, gradient_checkpointing=True))
    room = 3 << 30
    alone = predictor.longest_sequence(stage(2), world_size=4, device_memory=room)
    shared = predictor.longest_sequence(stage(2, sequence_parallel_size=4), world_size=4, device_memory=room)
    assert shared == pytest.approx(4 * alone, rel=0.05)
    total = stage(2, sequence_parallel_size=2, train_batch_size=16, gradient_accumulation_steps=2)
    assert predictor.predict(total, world_size=4).micro_batch == 4


@pytest.mark.parametrize(
    ("changes", "workload", "text"),
    [
        ({"sequence_parallel_size": 3}, {}, "does not divide the 4 processes"),
        ({"sequence_parallel_size": 2}, {"seq_len": 33}, "33 tokens does not divide over 2"),
        ({"sequence_parallel_size": 2}, {"attention": "eager"}, "give --attention sdpa"),
    ],
)
def test_sequences_that_cannot_be_shared(changes: dict[str, Any], workload: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, UnpredictableError), match=text):
        Predictor(TINY, Workload(**workload)).predict(stage(2, **changes), world_size=4)


@pytest.mark.parametrize(
    "name", ["gpt2:n_embd=32,n_layer=1,n_head=2,vocab=64", "t5:d_model=32,layers=1,heads=2,vocab=64"]
)
def test_sequences_are_shared_where_training_shares_them(name: str) -> None:
    """Of a configuration without ``num_key_value_heads``; what training refuses is not predicted."""
    predictor = Predictor(name, Workload(seq_len=32))
    if name.startswith("gpt2"):
        assert predictor.predict(stage(2, sequence_parallel_size=2), world_size=2).device["activations"]
        return
    with pytest.raises(UnpredictableError, match="cross-attention, which cannot be divided"):
        predictor.predict(stage(2, sequence_parallel_size=2), world_size=2)


def test_heads_that_do_not_go_together() -> None:
    """Flash attention on the meta device would take them."""
    with pytest.raises(UnpredictableError, match="4 heads of queries do not go with 3 of keys"):
        predict(TINY.replace("kv_heads=4", "kv_heads=3"), stage(2))


def test_processes_that_share_layers() -> None:
    model = build(TINY, Workload(seq_len=256))
    table = next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    kept = 0.0 if table in model.tp_plan else 512 * 64 / model.num_parameters()  # whole before transformers 5.20
    predictor = Predictor(TINY, Workload(seq_len=256))
    alone = predictor.predict(stage(0), world_size=4)
    for size in (2, 4):
        shared = predictor.predict(stage(0, tensor_parallel={"autotp_size": size}), world_size=4)
        for part in ("parameters", "masters", "moments"):  # besides, norms alone are whole
            assert shared.device[part] == pytest.approx(alone.device[part] * (kept + (1 - kept) / size), rel=0.05), part
        assert shared.device["activations"] < alone.device["activations"]
    # what ZeRO divides besides: every element of a state has one owner in the world, cut or not
    divided = predictor.predict(stage(3), world_size=4)
    both = predictor.predict(stage(3, tensor_parallel={"autotp_size": 2}), world_size=4)
    assert both.device["moments"] == pytest.approx(divided.device["moments"], rel=0.02)
    total = stage(2, tensor_parallel={"autotp_size": 2}, train_batch_size=16, gradient_accumulation_steps=2)
    assert predictor.predict(total, world_size=4).micro_batch == 4
    with pytest.raises(ConfigError, match="does not divide"):
        predictor.predict(stage(0, tensor_parallel={"autotp_size": 3}), world_size=3)


def test_a_model_with_a_table_of_positions_is_no_longer() -> None:
    predictor = Predictor("gpt2:n_embd=64,n_layer=2,n_head=4,vocab=512,n_positions=1000", Workload(seq_len=128))
    assert predictor.longest_sequence(stage(2), device_memory=80 << 30) == 768


def test_a_batch_of_another_length_than_was_said() -> None:
    inputs = {name: torch.zeros(1, 64, dtype=torch.long) for name in ("input_ids", "labels")}
    predictor = Predictor(TINY, Workload(inputs=inputs))
    with pytest.raises(UnpredictableError, match="nothing in the batch has 2048 tokens"):
        predictor.longest_sequence(stage(2), device_memory=3 << 30)
    said = Predictor(TINY, Workload(seq_len=64, inputs=inputs))
    assert said.longest_sequence(stage(2), device_memory=3 << 30) > 1024


def test_predictions_of_several_threads() -> None:
    """Recordings replace functions that all threads call."""
    configs = [stage(2), stage(2, sequence_parallel_size=2)]
    expected = [predict(TINY, config, Workload(seq_len=64), world_size=2) for config in configs]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda index: predict(TINY, configs[index % 2], Workload(seq_len=64), world_size=2), range(8))
        )
    assert found == expected * 4
    assert isinstance(torch.autocast, type)
