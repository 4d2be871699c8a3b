"""Quantized layers compute with what their blocks stand for, forward and backward, and say what they cannot do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ds_hf
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict
from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.modules.quantized.layers import is_quantized, quantize_layers
from ds_hf.errors import ConfigError, DsHfError
from tests.helpers.distributed import run_distributed
from tests.helpers.generating import GREEDY, left_padded, small_model

EIGHT = WeightFormat(8, 64)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(50, 64), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(self.embedding(ids)))).square().mean()


def test_a_quantized_model_is_the_model_with_its_rounded_weights() -> None:
    torch.manual_seed(0)
    model = Tiny()
    quantized = copy.deepcopy(model)
    assert quantize_layers(quantized, lambda name, module: EIGHT) == ["embedding", "up", "down"]
    assert type(quantized.up).__name__ == "QuantizedLinear"
    assert isinstance(quantized.up, nn.Linear)
    with torch.no_grad():
        for name in ("embedding", "up", "down"):
            getattr(model, name).weight.copy_(getattr(quantized, name).weight)
    ids = torch.randint(0, 50, (4, 9))
    torch.testing.assert_close(quantized(ids), model(ids))
    model(ids).backward()
    quantized(ids).backward()
    assert isinstance(quantized.up.bias, nn.Parameter)
    torch.testing.assert_close(quantized.up.bias.grad, model.up.bias.grad)
    again = copy.deepcopy(quantized)
    assert torch.equal(again(ids), quantized(ids))
    assert again.up._parameters["weight"] is not quantized.up._parameters["weight"]


def test_state_dicts_hold_what_the_weights_stand_for() -> None:
    model, other = Tiny(), Tiny()
    for each in (model, other):
        quantize_layers(each, lambda name, module: EIGHT)
    state = model.state_dict()
    assert state["up.weight"].shape == (96, 64)
    assert state["up.weight"].is_floating_point()
    other.load_state_dict(state)
    assert torch.equal(other.up.weight, model.up.weight)


def test_adapters_are_not_merged_into_blocks() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    quantize_layers(model, lambda name, module: EIGHT)
    with pytest.raises(DsHfError, match=r"q_proj cannot be merged: its base is kept in 8 or 4 bits"):
        model.merge_adapter()


def test_tied_weights_stay() -> None:
    model = small_model("gpt2")
    done = quantize_layers(model, lambda name, module: EIGHT)
    assert "lm_head" not in done
    assert "transformer.wte" not in done
    assert is_quantized(model.transformer.h[0].attn.c_attn)


def host(bits: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    options = {"num_bits": bits, "group_size": 64, "group_dim": 1, "symmetric": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "weight_quantization": {"quantized_initialization": options},
        **more,
    }


def shards(bits: int, folder: str) -> list[Any]:
    """Logits and bytes of an engine without an optimizer; half of the layers by name, with other bits."""
    model = small_model("llama")
    settings = host(bits)
    settings["weight_quantization"]["post_init_quant"] = {"self_attn": {"num_bits": 8}}
    engine, *_ = ds_hf.initialize(model=model, config=settings)
    engine.eval()
    with torch.no_grad():
        logits = engine(**left_padded()).logits.float()
        tokens = model.generate(**left_padded(), **GREEDY)
    kept = {id(b): b.shard.numel() * b.shard.element_size() for unit in engine.units for b in unit.buffers}
    return [logits.tolist(), tokens.shape[1], sum(kept.values())]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_zero_inference(world: int, tmp_path: Any) -> None:
    found = run_distributed(shards, world, 4, str(tmp_path), timeout=120)
    model = small_model("llama", dtype=torch.bfloat16)
    whole = sum(p.numel() * 2 for p in model.parameters())
    with torch.no_grad():
        exact = model(**left_padded()).logits.float()
    for logits, length, kept in found:
        assert length == 35
        assert kept < 0.42 * whole / world
        assert (torch.tensor(logits) - exact).norm() / exact.norm() < 0.7
    assert all(each[0] == found[0][0] for each in found)


def saved(folder: str) -> list[Any]:
    """What the files of a quantized engine hold, and what a second engine of the same kind makes of them."""
    settings = host(8)
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    model = small_model("llama")
    engine, *_ = ds_hf.initialize(model=model, config=settings)
    engine.save_16bit_model(folder)
    engine.save_checkpoint(folder, "one")
    with pytest.raises(DsHfError, match="save_16bit_model"):
        engine.export_pretrained(folder)
    other, *_ = ds_hf.initialize(model=small_model("llama", seed=1), config=settings)
    other.load_checkpoint(folder, "one")
    with torch.no_grad():
        logits = [each.eval()(**left_padded()).logits.tolist() for each in (engine, other)]
    return [logits[0] == logits[1], engine.global_rank]


def test_files_of_quantized_engines(tmp_path: Any) -> None:
    assert run_distributed(saved, 2, str(tmp_path), timeout=120) == [[True, 0], [True, 1]]
    state = torch.load(tmp_path / "pytorch_model.bin")
    for name, param in small_model("llama", dtype=torch.bfloat16).named_parameters():
        assert state[name].dtype == torch.bfloat16
        assert (state[name] - param).norm() < 0.01 * param.norm(), name


def adapters(quantized: bool, folder: str) -> list[float]:
    """Losses of three steps of LoRA on a frozen base."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model("llama").train(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": quantized},
    }
    engine, *_ = ds_hf.initialize(model=model, config=settings)
    base = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert is_quantized(base) is quantized
    losses = []
    for _ in range(3):
        loss = engine(**left_padded(), labels=left_padded()["input_ids"]).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_adapters_train_on_a_quantized_base(tmp_path: Any) -> None:
    ((first, *_, last),) = run_distributed(adapters, 1, False, str(tmp_path), timeout=120)
    found = run_distributed(adapters, 2, True, str(tmp_path), timeout=120)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(first, rel=0.1)
    assert found[0][-1] < found[0][0]
    assert found[0][-1] == pytest.approx(last, rel=0.2)


def divided(folder: str) -> list[Any]:
    """Layers cut over two processes under a head that trains; saved at one stage, and loaded at that and another."""
    found: list[Any] = []
    for stage in (1, 1, 3):
        model = small_model("llama").train().requires_grad_(False)
        model.lm_head.requires_grad_(True)
        settings = {
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": stage, "zero_quantized_nontrainable_weights": True},
        }
        engine, *_ = ds_hf.initialize(model=model, config=settings)
        if found:
            engine.load_checkpoint(folder, "one")
        loss = engine(**left_padded(), labels=left_padded()["input_ids"]).loss
        if not found:
            engine.save_checkpoint(folder, "one")
        whole = consolidated_state_dict(engine)
        named = {name: value.clone() for name, value in engine.named_weights()}
        found.append([loss.item(), whole, named])
        engine.destroy()
    return found


def test_blocks_of_layers_that_are_cut(tmp_path: Any) -> None:
    exact = dict(small_model("llama").named_parameters())
    first, second = run_distributed(divided, 2, str(tmp_path), timeout=120)
    for stage in (0, 1, 2):
        loss, whole, named = first[stage]
        assert loss == first[0][0] == second[stage][0]
        for name, param in exact.items():
            assert whole[name].shape == param.shape
            assert torch.equal(whole[name], named[name])
            assert torch.equal(whole[name], second[stage][2][name])
            assert (whole[name] - param).norm() <= 0.01 * param.norm(), name


def test_what_cannot_be() -> None:
    model = small_model("llama")
    with pytest.raises(ConfigError, match=r"do not train, and there is an optimizer.*freeze the weights"):
        ds_hf.initialize(model=model, config=host(8, optimizer={"type": "AdamW"}))
    quantize_layers(model, lambda name, module: EIGHT)
    with pytest.raises(ConfigError, match="is quantized already"):
        ds_hf.initialize(model=model, config=host(8))
    settings = host(8)
    settings["weight_quantization"] = {"num_bits": 8}
    with pytest.raises(ConfigError, match="give quantized_initialization"):
        ds_hf.initialize(model=small_model("llama"), config=settings)
