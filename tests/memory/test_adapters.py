"""Adapters and bases in few bits: what is asked for, and what it takes, against a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf.memory import Predictor, UnpredictableError, Workload
from ds_hf.memory.adapters import LoraRequest, add_lora, bits_of_options, count_parameters, load_in
from ds_hf.memory.models import build
from ds_hf.memory.script import rehearse
from tests.helpers.distributed import run_distributed
from tests.memory.measuring import train
from tests.memory.test_against_engine import BATCH, LENGTH, LLAMA, configuration

TINY = "llama:hidden=128,layers=2,heads=4,intermediate=352,vocab=512"
LINEAR = 2 * (4 * 128 * 128 + 3 * 128 * 352)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", LoraRequest()),
        ("8", LoraRequest(8)),
        ("r=32,targets=all-linear", LoraRequest(32)),
        ("targets=q_proj,v_proj,r=4", LoraRequest(4, ("q_proj", "v_proj"))),
        ("r=16,dora=true", LoraRequest(16, dora=True)),
    ],
)
def test_requests(text: str, found: LoraRequest) -> None:
    assert LoraRequest.parse(text) == found
    assert LoraRequest.parse(str(found)) == found


@pytest.mark.parametrize("text", ["r=0", "r=x", "alpha=3", "r=1,r=2", "dora=1"])
def test_what_is_no_request(text: str) -> None:
    with pytest.raises(UnpredictableError, match="write --lora r=16"):
        LoraRequest.parse(text)


def test_layers_that_there_are_not() -> None:
    with pytest.raises(UnpredictableError, match="--lora r=16,targets=nowhere"):
        add_lora(build(TINY, Workload()), LoraRequest(16, ("nowhere",)))


def test_values_are_not_made_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT draws them on the host, and moves what it drew: minutes for a rank of 100,000."""
    devices: set[str] = set()
    monkeypatch.setattr(nn.init, "kaiming_uniform_", lambda tensor, **_: devices.add(tensor.device.type))
    for asked in (LoraRequest(4), LoraRequest(4, dora=True)):
        add_lora(build(TINY, Workload()), asked)
    assert devices == {"meta"}


def test_encoders_that_do_not_generate() -> None:
    model = add_lora(build("bert:hidden=128,layers=2,heads=4,intermediate=256,vocab=512", Workload()), LoraRequest(4))
    whole, trains = count_parameters(model)
    linear: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(linear) >= 12
    assert trains == sum(4 * (m.in_features + m.out_features) for m in linear) < whole


def test_what_trains_and_what_it_takes() -> None:
    """Two small matrices beside each linear layer but the last; half a byte and 4 bytes for 64 of what is below."""
    plain = build(TINY, Workload())
    total = sum(p.numel() for p in plain.parameters())
    adapted = add_lora(load_in(plain, 4), LoraRequest(8))
    trained = 2 * 8 * (4 * (128 + 128) + 3 * (128 + 352))
    assert count_parameters(adapted) == (total + trained, trained)
    packed = sum(p.nbytes for p in adapted.parameters() if p.dtype is torch.int8)
    assert packed == pytest.approx(LINEAR * (0.5 + 4 / 64), rel=0.02)


@pytest.mark.parametrize(
    ("given", "bits"),
    [({"load_in_4bit": True}, 4), ({"load_in_8bit": True}, 8), ({"bits": 4}, 4), ({"bits": 3}, None), ({}, None)],
)
def test_bits_of_a_quantization_config(given: dict[str, Any], bits: int | None) -> None:
    assert bits_of_options(given) == bits


CELLS = [(None, 0), (None, 3), (4, 0), (8, 2)]


def _adapted(model: torch.nn.Module, bits: int | None) -> torch.nn.Module:
    return add_lora(model if bits is None else load_in(model, bits), LoraRequest(8))


def measured() -> list[int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    found = []
    for bits, stage in CELLS:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=3)).to(torch.bfloat16).train()
        batch = {"input_ids": tokens, "labels": tokens}
        found.append(train(_adapted(model, bits), configuration(stage, "bf16", 1), batch))
    return found


def test_peaks_of_real_training() -> None:
    from transformers import LlamaConfig

    (seen,) = run_distributed(measured, 1, timeout=110)
    for (bits, stage), peak in zip(CELLS, seen, strict=True):
        base = build(LlamaConfig(**LLAMA, num_hidden_layers=3), Workload()).to(torch.bfloat16)
        predictor = Predictor(_adapted(base, bits), Workload(seq_len=LENGTH))
        predictor.streams = False
        found = predictor.predict(configuration(stage, "bf16", 1))
        assert found.device_peak - found.device["workspaces"] == pytest.approx(peak, rel=0.05), (bits, stage)


EXPERTS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "use_cache": False,
}


def measured_experts() -> int:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    tokens = torch.randint(512, (BATCH, LENGTH))
    model = MixtralForCausalLM(MixtralConfig(**EXPERTS)).to(torch.bfloat16).train()
    batch = {"input_ids": tokens, "labels": tokens}
    return train(add_lora(model, LoraRequest(8)), configuration(0, "bf16", 1), batch)


def test_adapters_of_experts() -> None:
    """PEFT asks for ``torch.autocast`` on the device of their weights, which is none in a prediction."""
    from transformers import MixtralConfig

    (seen,) = run_distributed(measured_experts, 1, timeout=110)
    base = build(MixtralConfig(**EXPERTS), Workload()).to(torch.bfloat16)
    predictor = Predictor(add_lora(base, LoraRequest(8)), Workload(seq_len=LENGTH))
    predictor.streams = False
    found = predictor.predict(configuration(0, "bf16", 1))
    assert found.device_peak - found.device["workspaces"] == pytest.approx(seen, rel=0.1)


def test_loading_counts_each_weight_as_it_was() -> None:
    """Adapters in fp32 on a base in bf16 do not make the base twice as large."""
    base = build(TINY, Workload()).to(torch.bfloat16)
    alone = sum(p.nbytes for p in base.parameters())
    model = add_lora(base, LoraRequest(8))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    both = alone + sum(p.nbytes for p in model.parameters() if p.requires_grad)
    found = Predictor(model, Workload(seq_len=16)).predict(configuration(0, "bf16", 1))
    assert found.host["loading"] == both


QLORA = """
import sys, torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM
import deepspeed

quantized = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=quantized, dtype=torch.bfloat16)
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=8, target_modules="all-linear"))
config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
tokens = torch.zeros(2, 24, dtype=torch.long)
engine(input_ids=tokens, labels=tokens)
"""


def test_a_script_whose_base_is_quantized(tmp_path: Path) -> None:
    """Without weights, and without bitsandbytes."""
    build(TINY, Workload()).config.save_pretrained(tmp_path / "model")
    (tmp_path / "train.py").write_text(QLORA)
    learned = rehearse(tmp_path / "train.py", [str(tmp_path / "model")])
    assert learned.shape == (2, 24)
    packed = sum(p.nbytes for p in learned.model.parameters() if p.dtype is torch.int8)
    assert packed == pytest.approx(LINEAR * (0.5 + 4 / 64), rel=0.02)
    found = Predictor(learned.model, Workload(2, 24, inputs=learned.inputs)).predict(learned.config)
    assert found.device["moments"] < 9 * count_parameters(learned.model)[1]
