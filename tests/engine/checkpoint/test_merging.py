"""Adapters as parts of their weights: names and values against PEFT's ``merge_and_unload`` on one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LNTuningConfig, LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ds_hf.engine.checkpoint.merging import Merging
from ds_hf.errors import CheckpointError
from tests.engine.modules.generation.common import engine_of, llama, train
from tests.engine.zero.test_packed import wrapped
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj", "embed_tokens"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": ["v_proj", "up_proj"], "use_dora": True},
}


class Server:
    """Takes weights as vLLM's models do."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = self.model.state_dict(), set()
        for name, value in weights:
            own[name].copy_(value)
            loaded.add(name)
        return loaded


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Every adapter has an effect."""
    torch.manual_seed(5)
    model: Any = get_peft_model(llama(dtype=dtype), LoraConfig(r=4, lora_alpha=8, **KINDS[kind]))
    generator = torch.Generator().manual_seed(6)
    for name, param in model.named_parameters():
        if "lora_B" in name or "embedding_A" in name:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def expected(engine: Any, model: Any) -> dict[str, Tensor]:
    """What PEFT makes of the engine's weights."""
    model = copy.deepcopy(model)
    weights = full_weights(engine.module)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.data = weights[name].to(torch.float32).clone()
    found: dict[str, Tensor] = model.merge_and_unload().state_dict()
    return found


def check(kind: str, stage: int, folder: Path, more: dict[str, Any]) -> None:
    plain = adapted(kind)
    engine = engine_of(adapted(kind), stage, **more)
    train(engine, 1)
    wanted = expected(engine, plain)
    before = full_weights(engine.module)
    found = {name: value.clone() for name, value in engine.named_weights(torch.float32, merged=True)}
    assert set(found) == set(wanted)
    close = 5e-3 if "bf16" in more else 1e-6  # PEFT multiplies both parts of an adapter in their dtype
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=close, atol=close)
    buckets = list(engine.named_weights(torch.float32, merged=True, bucket_bytes=9000))
    assert [name for bucket in buckets for name, _ in bucket] == list(found)
    server = Server(llama())
    for bucket in buckets:
        assert server.load_weights(bucket) == {name for name, _ in bucket}
        assert len(bucket) == 1 or sum(value.nbytes for _, value in bucket) <= 9000
        assert all(value.untyped_storage().nbytes() == value.nbytes for _, value in bucket)
    for name, value in server.model.state_dict().items():
        assert torch.equal(value, found[name])
    engine.export_pretrained(folder, dtype=torch.float32, merged=True)
    for name, value in full_weights(engine.module).items():
        assert torch.equal(value, before[name]), "the model stays as it is"
    train(engine, 2)
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in found.items():
        assert torch.equal(loaded[name], value)
    engine.destroy()


@pytest.mark.parametrize(("kind", "stage"), [("lora", 3), ("rslora", 1), ("dora", 3)])
def test_weights_are_those_that_peft_merges(kind: str, stage: int, tmp_path: Path) -> None:
    run_distributed(check, 2, kind, stage, tmp_path, {})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("lora", 0), ("rslora", 2), ("rslora", 3), ("dora", 2)])
def test_at_the_other_stages(kind: str, stage: int, tmp_path: Path) -> None:
    run_distributed(check, 2, kind, stage, tmp_path, {"bf16": {"enabled": True}} if stage == 2 else {})


def cut(stage: int) -> None:
    plain = adapted("rslora")
    engine = engine_of(adapted("rslora"), stage, tensor_parallel={"autotp_size": 2})
    wanted = plain.merge_and_unload().state_dict()
    found = dict(engine.named_weights(merged=True))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_layers_that_tensor_parallelism_has_cut() -> None:
    run_distributed(cut, 2, 1)


def test_names_without_adapters() -> None:
    model = adapted("rslora")
    merging = Merging(model)
    layer = "base_model.model.model.layers.0.self_attn.q_proj."
    assert merging.name_of(f"{layer}base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert merging.name_of(f"{layer}lora_A.default.weight") is None
    assert merging.name_of("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert merging.name_of("base_model.model.lm_head.original_module.weight") is None
    assert merging.changes(f"{layer}base_layer.weight")
    model.base_model.disable_adapter_layers()
    assert not Merging(model).changes(f"{layer}base_layer.weight")
    shared = get_peft_model(llama(), VeraConfig(r=2, target_modules=["q_proj"]))
    assert Merging(shared).name_of("base_model.vera_A.default") is None
    plain = llama()
    assert Merging(plain).name_of("model.norm.weight") == "model.norm.weight"


def test_what_no_weight_can_hold_is_refused() -> None:
    prompts = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(CheckpointError, match="adds tokens"):
        Merging(prompts)


def of_more_than_one_weight() -> list[str]:
    """What is said of biases that take a part of the weight (GLoRA), and of norms that take each other's place."""
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=16, eos_token_id=5))
    biased = get_peft_model(gpt2, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for module in biased.modules():
        if hasattr(module, "lora_A"):
            base = module.get_base_layer()
            module.merge = lambda safe_merge=False, base=base: base.bias.data.add_(base.weight.sum())
    said = []
    for model in (biased, get_peft_model(llama(), LNTuningConfig(target_modules=["input_layernorm"]))):
        engine = engine_of(model, 1)
        before = full_weights(engine.module)
        for _ in range(2):
            with pytest.raises(CheckpointError) as error:
                list(engine.named_weights(merged=True))
        said.append(str(error.value))
        for name, value in full_weights(engine.module).items():
            assert torch.equal(value, before[name])
        engine.destroy()
    return said


def test_what_is_of_more_than_one_weight_is_refused_and_the_model_stays() -> None:
    ((weights, norms),) = run_distributed(of_more_than_one_weight, 1)
    assert "depends on the layer's other weights" in weights
    assert "puts another module in its place" in norms


def of_a_base_in_few_bits(stage: int, folder: Path) -> list[str]:
    """What is said where a library quantized the base: torchao's weights are several tensors, and each has a name."""
    model = adapted("dora")
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.base_layer.weight = wrapped(module.base_layer.weight.detach())
    engine = engine_of(model, stage)
    names = [name for name, _ in engine.named_weights()]
    assert sum(name.endswith("v_proj.base_layer.weight.values") for name in names) == len(model.model.model.layers)
    said = []
    for write in (
        lambda: list(engine.named_weights(merged=True)),
        lambda: engine.export_pretrained(folder, merged=True),
        lambda: engine.export_pretrained(folder),
    ):
        with pytest.raises(CheckpointError) as error:
            write()
        said.append(str(error.value))
    assert not folder.exists()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_base_that_a_library_quantized_is_refused(stage: int, tmp_path: Path) -> None:
    ((merged, *exported),) = run_distributed(of_a_base_in_few_bits, 1, stage, tmp_path / "out")
    assert "base_layer.weight.values is in few bits, to which no adapter can be added" in merged
    assert all("is in few bits of bitsandbytes or torchao" in each for each in exported)


def tied(folder: Path) -> None:
    model = get_peft_model(llama(tied=True), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    engine = engine_of(model, 3)
    found = dict(engine.named_weights(merged=True))
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="tied to"):
        engine.export_pretrained(folder, merged=True)
    assert not folder.exists()
    with pytest.raises(ValueError, match="bucket_bytes"):
        engine.named_weights(bucket_bytes=0)


def test_an_adapter_of_one_of_two_tied_weights(tmp_path: Path) -> None:
    run_distributed(tied, 2, tmp_path / "out")
