"""Models of transformers: DeepSpeed's public files on small ones, an unmodified Trainer, adapters, compiled blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from ds_hf import initialize
from ds_hf.compression import init_compression, redundancy_clean
from ds_hf.compression.compressed import Compressed
from ds_hf.engine.zero.gather import GatheredParameters
from tests.compat.trainer_code import config as trainer_config
from tests.compat.trainer_code import make_trainer, tiny_llama
from tests.compression.common import MICRO, config, method
from tests.config.test_compression import EXAMPLES
from tests.helpers.distributed import run_distributed

IDS = torch.randint(0, 64, (MICRO, 12), generator=torch.Generator().manual_seed(1))


def bert(layers: int = 5) -> BertForSequenceClassification:
    torch.manual_seed(layers)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=12,
        )
    )


def begins_at(section: dict[str, Any], step: int) -> dict[str, Any]:
    section = copy.deepcopy(section)
    for content in section.values():
        if "shared_parameters" in content:
            content["shared_parameters"]["schedule_offset"] = step
    return section


@pytest.mark.parametrize("name", EXAMPLES)
def test_deepspeeds_examples_run_to_the_end(name: str) -> None:
    """With their files, of which only the step at which methods begin is another."""
    section = begins_at(EXAMPLES[name], 1)
    labels = torch.zeros(MICRO, dtype=torch.long)
    model: Any = bert()
    if name.startswith("GPT-2"):
        torch.manual_seed(0)
        model, labels = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)), IDS
    teacher = bert(12) if "layer_reduction" in section else None
    file = config(section, 2)
    init_compression(model, file, teacher_model=teacher)
    if teacher is not None:
        told = model.bert.encoder.layer[1].attention.self.query.weight
        assert torch.equal(told, teacher.bert.encoder.layer[4].attention.self.query.weight)
    engine = initialize(model=model, config=file)[0]
    losses = []
    for _ in range(5):
        loss = engine(input_ids=IDS, labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert min(losses[1:]) < losses[0]
    model = redundancy_clean(engine, file)
    layers = {name: module for name, module in model.named_modules() if name.endswith(("query", "mlp.c_fc"))}
    assert layers
    bits = section.get("weight_quantization")
    for layer in layers.values():
        weight: Any = layer.weight
        if bits is not None and "head_pruning" not in section:
            groups = bits["shared_parameters"]["quantize_groups"]
            rows = (weight.t() if name.startswith("GPT-2") else weight).reshape(groups, -1)
            assert all(
                row.unique().numel() <= 2 ** bits["different_groups"]["wq1"]["params"]["target_bits"] for row in rows
            )
        if "head_pruning" in section:
            assert weight.shape == (24, 48)
            assert (weight == 0).float().mean() > 0.25
    with torch.no_grad():
        assert model(input_ids=IDS).logits.isfinite().all()


SECTION = {
    "weight_quantization": method({"target_bits": 4}, ["_proj"], quantize_groups=4, schedule_offset=1),
    "row_pruning": method({"dense_ratio": 0.5}, ["gate_proj"], [["up_proj", "down_proj"]], schedule_offset=2),
}


def by_trainer(folder: str, stage: int, learned: bool) -> dict[str, Any]:
    section = copy.deepcopy(SECTION)
    if learned:
        section["row_pruning"]["shared_parameters"]["method"] = "topk"
    trainer = make_trainer(
        f"{folder}/{stage}",
        trainer_config(stage, compression_training=section),
        trainer_arguments={"model_init": _from_folder(folder)},
    )
    trainer.train()
    model = trainer.model
    history = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    kinds = sum(isinstance(module, Compressed) for module in model.modules())
    model = redundancy_clean(
        trainer.model_wrapped if hasattr(trainer.model_wrapped, "global_steps") else trainer.deepspeed
    )
    trainer.save_model(f"{folder}/{stage}/smaller")  # the engine is gone
    dist.barrier()
    kept = {name: param.detach().clone() for name, param in model.named_parameters()}
    rows = tuple(model.model.layers[0].mlp.gate_proj.weight.shape)
    return {"losses": history, "kinds": kinds, "rows": rows, "kept": kept}


def _from_folder(folder: str) -> Any:
    return lambda: LlamaForCausalLM.from_pretrained(f"{folder}/model")


@pytest.mark.parametrize("learned", [False, True])
def test_an_unmodified_trainer_compresses_at_every_stage(tmp_path: Path, learned: bool) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    curves = []
    for stage in (0, 3):
        for result in run_distributed(by_trainer, 2, str(tmp_path), stage, learned, backend=None, timeout=120):
            assert result["kinds"] == 14
            assert result["rows"] == (32, 32)
            curves.append(result["losses"])
            saved = LlamaForCausalLM.from_pretrained(tmp_path / str(stage) / "smaller")
            assert saved.config.intermediate_size == 32
            assert all(torch.equal(param, result["kept"][name]) for name, param in saved.named_parameters())
    assert len(curves[0]) == 4
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-4)


EVERYTHING = {
    "weight_quantization": method(
        {"start_bits": 6, "target_bits": 4, "quantization_period": 1},
        ["_proj"],
        quantize_groups=4,
        schedule_offset=1,
        fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.3},
    ),
    "activation_quantization": method({"bits": 8}, ["_proj"], range_calibration="static", schedule_offset=1),
    "sparse_pruning": method({}, ["self_attn"], block_pattern="2:4", schedule_offset=2),
    "row_pruning": method(
        {"dense_ratio": 0.5}, ["gate_proj"], [["up_proj", "down_proj"]], schedule_offset=1, method="topk"
    ),
}


def curve(stage: int, checkpointing: bool = False, offload: bool = False, **more: Any) -> list[float]:
    if offload:
        device = {"device": "cpu"}
        more["zero_optimization"] = {"stage": 3, "offload_optimizer": device, "offload_param": device}
    model: Any = tiny_llama(vocab_size=64)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
    engine = initialize(model=model, config=config(EVERYTHING, stage, **more))[0]
    losses = []
    for _ in range(6):
        loss = engine(input_ids=IDS, labels=IDS).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ({"checkpointing": True}, 1e-6),
        ({"bf16": {"enabled": True}}, 1e-2),
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 5e-3),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, 1e-2),
        ({"ds_hf": {"chunked_loss": True}}, 1e-4),
        ({"offload": True}, 1e-5),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, None),
        pytest.param({"ds_hf": {"compile": "blocks"}}, 1e-3, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_all_at_once_in_other_ways_of_computing(more: dict[str, Any], tolerance: float | None) -> None:
    expected = curve(0, **({} if tolerance is not None else more))  # another optimizer has numbers of its own
    tolerance = tolerance or 1e-4
    assert expected[-1] < expected[0]
    for stage in (0, 3):
        assert curve(stage, **more) == pytest.approx(expected, rel=tolerance), stage


def adapted(stage: int) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "gate_proj"]))
    section = {"weight_quantization": method({"target_bits": 4}, ["*"], quantize_groups=4, schedule_offset=0)}
    file = config(section, stage)
    init_compression(model, file)
    compressed = {name for name, module in model.named_modules() if isinstance(module, Compressed)}
    assert not [name for name in compressed if "lora" in name]
    assert [name for name in compressed if "q_proj.base_layer" in name]
    engine = initialize(model=model, config=file)[0]
    losses = []
    for _ in range(3):
        loss = engine(input_ids=IDS, labels=IDS).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with GatheredParameters(model.parameters()):
        adapters = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_B" in name}
    weights = redundancy_clean(engine).base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    dist.barrier()
    return losses, adapters, weights.detach()


def test_adapters_train_over_a_quantized_base() -> None:
    first = run_distributed(adapted, 2, 0)
    for losses, adapters, weight in (*first, *run_distributed(adapted, 2, 3)):
        assert losses == pytest.approx(first[0][0], rel=1e-5)
        assert losses[2] < losses[0]
        assert len(adapters) == 4
        assert all(value.abs().sum() > 0 for value in adapters.values())
        assert all(part.unique().numel() <= 16 for part in weight.reshape(4, -1))
