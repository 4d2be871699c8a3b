"""What is left in the end: values, shapes, configurations; what plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from ds_hf import initialize
from ds_hf.compression import init_compression, redundancy_clean
from ds_hf.compression.compressed import Compressed, unpack
from ds_hf.compression.schedule import compression_scheduler
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import forget_said
from tests.compression.common import MICRO, Net, batches, config, logged, method, net, run
from tests.helpers.distributed import run_distributed

IDS = torch.randint(0, 64, (MICRO, 12), generator=torch.Generator().manual_seed(1))
GATED = method({"dense_ratio": 0.5}, ["gate_proj"], [["up_proj", "down_proj"]], schedule_offset=1)
GROUPED_HEADS = method(
    {"dense_ratio": 0.5},
    ["o_proj"],
    [["q_proj", "k_proj", "v_proj"]],
    schedule_offset=1,
    method="l1",
    num_heads=2,
)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(2)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def bert() -> BertForSequenceClassification:
    torch.manual_seed(2)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )


def trained(model: Any, section: dict[str, Any], stage: int, labels: Tensor = IDS, steps: int = 3) -> Any:
    file = config(section, stage)
    init_compression(model, file)
    engine = initialize(model=model, config=file)[0]
    for _ in range(steps):
        engine.backward(engine(input_ids=IDS, labels=labels).loss)
        engine.step()
    engine.eval()
    return engine


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found.clone()


@pytest.mark.parametrize("stage", [0, 3])
def test_gated_mlps_and_grouped_heads_are_half_as_large_and_load_in_transformers(stage: int, tmp_path: Path) -> None:
    section = {
        "weight_quantization": method({"target_bits": 4}, ["_proj"], quantize_groups=4, schedule_offset=1),
        "row_pruning": GATED,
        "head_pruning": GROUPED_HEADS,
    }
    engine = trained(llama(), section, stage)
    expected = logits(engine)
    model = redundancy_clean(engine, config(section, stage))
    assert torch.equal(logits(model), expected)
    assert not any(isinstance(module, Compressed) for module in model.modules())
    layer = model.model.layers[0]
    shapes = {name: tuple(param.shape) for name, param in layer.named_parameters() if "proj" in name}
    assert shapes == {
        "self_attn.q_proj.weight": (16, 32),
        "self_attn.k_proj.weight": (4, 32),
        "self_attn.v_proj.weight": (4, 32),
        "self_attn.o_proj.weight": (32, 16),
        "mlp.gate_proj.weight": (32, 32),
        "mlp.up_proj.weight": (32, 32),
        "mlp.down_proj.weight": (32, 32),
    }
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), expected)
    assert (loaded.config.intermediate_size, loaded.config.num_attention_heads) == (32, 4)
    assert (loaded.config.num_key_value_heads, loaded.config.head_dim) == (1, 4)
    assert loaded.model.embed_tokens.weight is loaded.lm_head.weight


@pytest.mark.parametrize("learned", [False, True])
def test_rows_of_bert_are_gone(learned: bool, tmp_path: Path) -> None:
    rows = method(
        {"dense_ratio": 0.25},
        ["intermediate.dense"],
        [["layer.\\w+.output.dense"]],
        schedule_offset=1,
        method="topk" if learned else "l1",
    )
    labels = torch.zeros(MICRO, dtype=torch.long)
    engine = trained(bert(), {"row_pruning": rows}, 0, labels)
    expected = logits(engine)
    model = redundancy_clean(engine)
    torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)
    assert model.bert.encoder.layer[1].intermediate.dense.weight.shape == (16, 32)
    assert model.bert.encoder.layer[1].output.dense.in_features == 16
    assert not [name for name, _ in model.named_parameters() if "score" in name]
    model.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.intermediate_size == 16
    assert torch.equal(logits(loaded), logits(model))


def test_heads_that_transformers_cannot_say_are_told_and_compute() -> None:
    heads = method(
        {"dense_ratio": 0.5},
        ["attention.output.dense"],
        [["self.query", "self.key", "self.value"]],
        schedule_offset=1,
        method="topk",
        num_heads=4,
    )
    engine = trained(bert(), {"head_pruning": heads}, 0, torch.zeros(MICRO, dtype=torch.long))
    expected = logits(engine)
    with logged() as lines:
        model = redundancy_clean(engine)
    assert any("plain transformers cannot load" in line and "query.weight is (16, 32)" in line for line in lines)
    torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)
    assert model.bert.encoder.layer[0].attention.self.query.weight.shape == (16, 32)
    assert model.config.num_attention_heads == 4


def test_gpt2_is_compressed_without_conversion(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))
    names = [name for name, _ in model.named_parameters()]
    section = {
        "weight_quantization": method({"target_bits": 4}, ["mlp"], quantize_groups=8, schedule_offset=1),
        "sparse_pruning": method({}, ["attn.c"], block_pattern="2:4", schedule_offset=1),
        "row_pruning": method({"dense_ratio": 0.5}, ["mlp.c_fc"], [["mlp.c_proj"]], schedule_offset=1),
    }
    engine = trained(model, section, 2)
    assert [name for name, _ in model.named_parameters()] == names
    expected = logits(engine)
    model = redundancy_clean(engine)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    block = model.transformer.h[0]
    assert block.mlp.c_fc.weight.shape == (32, 64)
    inputs = block.attn.c_attn.weight.t().reshape(-1, 4)
    assert ((inputs == 0).sum(dim=1) == 2).all()
    model.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert loaded.config.n_inner == 64
    assert torch.equal(logits(loaded), logits(model))


def test_values_are_the_files() -> None:
    section = {
        "weight_quantization": method({"target_bits": 3}, ["fc1"], quantize_groups=16, schedule_offset=1),
        "sparse_pruning": method({"dense_ratio": 0.25}, ["fc"], schedule_offset=1),
    }
    model, file = net(), config(section)
    init_compression(model, file)
    engine = initialize(model=model, config=file)[0]
    run(engine, batches(1))
    model = redundancy_clean(engine, file)
    assert type(model.fc1) is nn.Linear
    assert set(vars(model.fc1)) == set(vars(nn.Linear(2, 2)))
    assert (model.fc2.weight == 0).sum() == 96
    assert (model.fc1.weight == 0).sum() >= 96
    assert all(row.unique().numel() <= 8 for row in model.fc1.weight)
    assert model.head.weight.unique().numel() == 128


class Image(nn.Module):
    """Two convolutions with a norm between, and a head on the flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.one(x)).relu()
        found: Tensor = self.out(self.two(hidden).relu().flatten(1))
        return found


@pytest.mark.parametrize(("stage", "how"), [(0, "l1"), (3, "topk"), (3, "l1")])
def test_channels_are_gone_with_norms_convolutions_and_flattened_inputs(stage: int, how: str) -> None:
    torch.manual_seed(0)
    model = Image()
    with torch.no_grad():
        model.norm.bias.normal_()  # what a channel of zeros would give
    group = {"params": {"dense_ratio": 0.5}, "modules": ["one", "two"], "related_modules": [["norm", "two"], ["out"]]}
    section = {
        "channel_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": 0},
            "different_groups": {"all": group},
        }
    }
    x = torch.randn(MICRO, 3, 4, 4)
    file = config(section, stage)
    section["channel_pruning"]["shared_parameters"]["method"] = how  # type: ignore[index]
    init_compression(model, file)
    engine = initialize(model=model, config=file)[0]
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.eval()
    with torch.no_grad():
        expected = engine(x).clone()
    redundancy_clean(engine, file)
    assert model.one.weight.shape == (4, 3, 3, 3)
    assert model.norm.num_features == model.norm.running_var.numel() == 4
    assert model.two.weight.shape == (2, 4, 3, 3)
    assert model.out.weight.shape == (5, 32)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_norms_that_a_model_does_not_have_are_no_fault_beside_what_it_has() -> None:
    """DeepSpeed's file for its ResNet names norms, and its script makes the model with none."""
    model = Image()
    model.norm = nn.Identity()  # type: ignore[assignment]

    def section(related: list[str]) -> dict[str, Any]:
        return {"channel_pruning": method({"dense_ratio": 0.5}, ["one"], [related])}

    with pytest.raises(ConfigError, match="'bn1' is in no module's name"):
        init_compression(Image(), config(section(["two", "bn1"])))
    for related in (["too", "bn1"], ["bn1"]):
        with pytest.raises(ConfigError, match="is in no module's name"):
            init_compression(model, config(section(related)))
    with logged() as lines:
        init_compression(model, config(section(["two", "bn1"])))
    assert any("'bn1' is in no module's name, and the model has no batch norms" in line for line in lines)
    assert redundancy_clean(model).two.in_channels == 4


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("scheduler", [True, False])
def test_a_model_whose_engine_lives_leaves_it(stage: int, scheduler: bool) -> None:
    """DeepSpeed's examples clean the model and not the engine, which is a local variable of theirs."""
    file = config({"row_pruning": method({}, ["fc1"], [["fc2"]])}, stage)
    model = init_compression(net(), file)
    engine = initialize(model=model, config=file)[0]
    data = batches(1)
    run(engine, data)
    with torch.no_grad():
        expected = engine(data[0, 0]).clone()
    if scheduler:
        compression_scheduler(model, file)
    assert redundancy_clean(model, file).fc1.out_features == 8
    torch.testing.assert_close(model(data[0, 0]), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(DsHfError, match="destroyed"):
        engine.step()


def test_another_file_or_none_before_is_refused() -> None:
    file = config({"row_pruning": method({}, ["fc1"])})
    with pytest.raises(ConfigError, match="init_compression"):
        redundancy_clean(net(), file)
    model = init_compression(net(), file)
    with pytest.raises(ConfigError, match="another compression_training"):
        redundancy_clean(model, config({"row_pruning": method({}, ["fc2"])}))


def test_a_method_that_had_not_begun_is_applied_and_told() -> None:
    model = init_compression(net(), config({"sparse_pruning": method({"dense_ratio": 0.5}, ["fc1"])}))
    with logged() as lines:
        redundancy_clean(model)
    assert any("sparse_pruning had not begun" in line for line in lines)
    assert (model.fc1.weight == 0).sum() == 64


@pytest.mark.parametrize(("first", "late"), [(1, "sparse_pruning, row_pruning"), (4, "sparse_pruning")])
def test_weights_of_an_earlier_step_are_pruned_to_the_end(first: int, late: str) -> None:
    """Those of the best evaluation, loaded by themselves: by them, whatever the engine has chosen since."""
    section = {
        "row_pruning": method({"dense_ratio": 0.5}, ["fc1"], [["fc2"]], schedule_offset=2),
        "sparse_pruning": method({"dense_ratio": 0.25}, ["emb"], schedule_offset=2, schedule_offset_end=6),
    }
    file = config(section)
    engine = initialize(model=init_compression(net(), file), config=file)[0]
    run(engine, batches(1)[:first])
    early = {name: value.clone() for name, value in engine.module.state_dict().items()}
    run(engine, batches(1)[first:])
    engine.module.load_state_dict(early)
    with logged() as lines:
        model = redundancy_clean(engine, file)
    assert any(line.startswith(f"{late} had not begun, or not reached its end") for line in lines)
    rows, weight = early["fc1.row_pruning_mask"], early["fc1.weight"]
    assert rows.all() == (first == 1)
    largest = (weight.abs().sum(1) * rows).topk(8).indices.sort().values
    assert torch.equal(model.fc1.weight, weight[largest])
    weight = early["emb.weight"]
    kept = weight.abs() * unpack(early["emb.sparse_pruning_mask"], weight.shape)
    assert torch.equal(model.emb.weight, torch.where(kept >= kept.flatten().topk(32).values[-1], weight, 0.0))


def test_a_state_dict_is_cleaned_elsewhere() -> None:
    """As DeepSpeed's scripts do: initialise the model again, load, clean."""
    section = {
        "row_pruning": method({"dense_ratio": 0.5}, ["fc1"], [["fc2"]], method="topk"),
        "sparse_pruning": method({"dense_ratio": 0.3}, ["fc2", "emb"]),
        "weight_quantization": method({"target_bits": 5}, ["fc"]),
    }
    file = config(section)
    engine = initialize(model=init_compression(net(), file), config=file)[0]
    run(engine, batches(1))
    kept = {name: value.clone() for name, value in engine.module.state_dict().items()}
    expected = redundancy_clean(engine, file)
    torch.manual_seed(9)
    other = init_compression(Net(), file)
    other.load_state_dict(kept)
    other = redundancy_clean(other, file)
    assert other.fc1.out_features == 8
    for name, param in expected.named_parameters():
        assert torch.equal(other.get_parameter(name), param)


def cleaned(stage: int) -> dict[str, Tensor]:
    file = config({"row_pruning": method({"dense_ratio": 0.5}, ["fc1"], [["fc2"]])}, stage)
    model = init_compression(net(), file)
    engine = initialize(model=model, config=file)[0]
    run(engine, batches(2), torch.distributed.get_rank())
    model = redundancy_clean(engine, file)
    return {name: param.detach() for name, param in model.named_parameters()}


def test_stages_end_in_the_same_model_on_all_processes() -> None:
    first = run_distributed(cleaned, 2, 0)[0]
    for other in (run_distributed(cleaned, 2, 0)[1], *run_distributed(cleaned, 2, 3)):
        assert other.keys() == first.keys()
        for name, weight in other.items():
            assert weight.shape == first[name].shape
            torch.testing.assert_close(weight, first[name], rtol=2e-5, atol=2e-5)


def test_adapters_over_compressed_weights_are_written_with_them(tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(4)
        lora = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
        return get_peft_model(llama(), lora)  # type: ignore[arg-type]

    def loss_of(model: Any) -> Tensor:
        loss: Tensor = model(input_ids=IDS, labels=IDS).loss
        return loss

    section = {"sparse_pruning": method({"dense_ratio": 0.5}, ["mlp"], schedule_offset=0)}
    forget_said()
    with logged() as lines:
        engine = initialize(model=adapted(), config=config(section))[0]
    assert any("save_pretrained() writes the adapters alone" in line for line in lines)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    model = redundancy_clean(engine)
    trained = loss_of(model).item()
    model.save_pretrained(tmp_path / "adapters")
    model.merge_and_unload().save_pretrained(tmp_path / "whole")
    assert loss_of(LlamaForCausalLM.from_pretrained(tmp_path / "whole")).item() == pytest.approx(trained, rel=1e-6)
    alone = PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    assert abs(loss_of(alone).item() - trained) > 1e-3  # over weights that were not compressed
