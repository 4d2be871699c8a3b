"""What is cut of a model, what stays whole, and what is refused, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3ForCausalLM

from ds_hf.config import load_config
from ds_hf.config.types.parallel import TensorParallelSection
from ds_hf.engine.parallel.pipeline.holes import Skip
from ds_hf.engine.parallel.tensor.plan import Slicing, plan_division
from ds_hf.engine.zero.replicas import tie_over_stages
from ds_hf.errors import ConfigError
from tests.helpers.tensor import build

SECTION = TensorParallelSection(autotp_size=2)


def llama(**more: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more}))


def planned(model: nn.Module, size: int = 2) -> dict[str, Slicing]:
    return {division.name: division for division in plan_division(model, SECTION, size)}


def test_the_plan_of_a_model_of_transformers() -> None:
    found = planned(llama())
    layer = "model.layers.0."
    assert set(found) - {"model.embed_tokens"} == {  # which older versions of transformers leave whole
        "lm_head",
        *(f"{layer}self_attn.{name}_proj" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    head = found["lm_head"].cut("weight", (64, 32), rank=1, size=2)
    assert (head.dim, head.ranges) == (0, ((32, 32),))
    down = found[f"{layer}mlp.down_proj"].cut("weight", (32, 48), rank=1, size=2)
    assert (down.dim, down.ranges) == (1, ((24, 24),))


def test_a_tied_head_stays_whole() -> None:
    assert "lm_head" not in planned(llama(tie_word_embeddings=True))


def test_a_head_with_an_adapter_is_not_cut_by_the_vocabulary() -> None:
    """It was called "a Linear", of which only linear layers are cut."""
    adapted = get_peft_model(llama(), LoraConfig(target_modules=["lm_head"]))
    section = TensorParallelSection(autotp_size=2, vocab_parallel_lm_head=True)
    with pytest.raises(ConfigError, match=r"lm_head is a peft\.\S+\.Linear, and only an nn\.Linear is cut by it"):
        list(plan_division(adapted, section, 2))


def test_a_learned_activation_beside_cut_layers_has_a_part_of_its_gradient() -> None:
    """The plan of Apertus does not name it, and the mean of its parts would be too small by the size of the axis."""
    apertus = pytest.importorskip("transformers.models.apertus")
    sizes = {key: getattr(llama().config, key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    config = apertus.ApertusConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    assert planned(apertus.ApertusForCausalLM(config))["model.layers.0.mlp.act_fn"].sums == ["alpha_p", "alpha_n"]
    model = llama()
    model.model.layers[0].mlp.act_fn = nn.PReLU()
    model.model.layers[0].input_layernorm = nn.PReLU()  # not beside a layer that is cut: whole, as its gradient is
    assert [name for name, division in planned(model).items() if division.sums] == ["model.layers.0.mlp.act_fn"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_of_a_pipeline_is_cut_where_it_has_the_layer(tied: bool) -> None:
    first, last = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    first.lm_head = Skip()
    if tied:
        tie_over_stages(first.model.embed_tokens.weight, "the tied embedding", [0, 1])
    else:
        last.model.embed_tokens = Skip()
    embeds, ends = ("model.embed_tokens" in planned(llama()) and not tied), not tied
    assert ("model.embed_tokens" in planned(first), "lm_head" in planned(first)) == (embeds, False)
    assert ("model.embed_tokens" in planned(last), "lm_head" in planned(last)) == (False, ends)


@pytest.mark.parametrize("way", ["instance", "class"])
def test_a_head_stays_whole_where_a_fused_loss_reads_its_weight(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()

    def fused(self: Any, input_ids: torch.Tensor, **unused: Any) -> torch.Tensor:
        return self.model(input_ids).last_hidden_state @ self.lm_head.weight.t()  # type: ignore[no-any-return]

    fused.__module__ = "liger_kernel.transformers.model.llama"
    if way == "instance":
        model.forward = fused.__get__(model)
    else:
        monkeypatch.setattr(LlamaForCausalLM, "forward", fused)
    found = planned(model)
    assert "lm_head" not in found
    assert "model.layers.0.self_attn.q_proj" in found


def test_a_subclass_of_a_script_is_cut_as_its_base() -> None:
    class Own(LlamaForCausalLM):
        pass

    assert "lm_head" in planned(Own(llama().config))


@pytest.mark.parametrize(
    ("sizes", "size", "said"),
    [
        ({"intermediate_size": 50}, 4, r"mlp\.gate_proj .*50.* which 4 does not divide"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, r"heads"),
    ],
)
def test_sizes_that_do_not_divide(sizes: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(llama(**sizes), size)


def test_an_odd_vocabulary_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, even = llama(vocab_size=63), planned(llama(vocab_size=62))
    found = planned(model)
    assert set(even) - set(found) == set(even) & {"lm_head", "model.embed_tokens"}
    assert "lm_head (weight (63, 32)) are 63, which 2 does not divide, so this layer stays whole" in caplog.text
    assert "resize_token_embeddings(..., pad_to_multiple_of=2)" in caplog.text
    section = TensorParallelSection(autotp_size=2, vocab_parallel_lm_head=True)
    with pytest.raises(ConfigError, match=r"lm_head .*63.* which 2 does not divide"):
        plan_division(model, section, 2)


def test_a_model_without_a_plan_gets_one_to_start_from() -> None:
    with pytest.raises(ConfigError, match=r"Sequential has no tp_plan(?s:.*)partition_config(?s:.*)partition_type"):
        planned(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_an_unknown_style_is_refused_with_the_module() -> None:
    model = llama()
    model._tp_plan = {"lm_head": "diagonal"}
    with pytest.raises(ConfigError, match=r"lm_head(?s:.*)diagonal"):
        planned(model)


@pytest.mark.parametrize(
    ("kept", "told"),
    [("lm_head", "divides lm_head of LlamaForCausalLM"), ("", "divides nothing of"), ("*", "")],
)
def test_a_plan_of_the_head_alone_is_told(
    kept: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen3-VL's of transformers 5.23, of whose blocks it says nothing; also where the head is tied, and stays."""
    model = llama(num_hidden_layers=2, tie_word_embeddings=not kept)
    if kept != "*":
        monkeypatch.setattr(model.config, "base_model_tp_plan", None)
        model._tp_plan = {"lm_head": "colwise_gather_output"}
        monkeypatch.setattr(model.model, "_tp_plan", {})
    found = planned(model)
    assert ("lm_head" in {name for name, division in found.items() if division.parts}) == bool(kept)
    assert told in caplog.text
    assert ("no layer of its blocks" in caplog.text) == bool(told)


def rules(pattern: str, shape: list[Any] | None) -> TensorParallelSection:
    spec = {"patterns": [pattern], "partition_type": "column", **({} if shape is None else {"shape": shape})}
    partition = {"use_default_specs": False, "layer_specs": [spec]}
    return load_config(
        {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2, "partition_config": partition}},
        check_batch=False,
    ).tensor_parallel


@pytest.mark.parametrize(
    ("model", "pattern", "wrong", "right", "said"),
    [
        (GPTNeoXForCausalLM, r".*query_key_value\.weight$", [[32, 32, 32], -1], None, 'leave "shape" out'),
        (Phi3ForCausalLM, r".*gate_up_proj\.weight$", None, [2, -1], r'"shape": \[\[64, 64\], -1\]'),
        (LlamaForCausalLM, r".*q_proj\.weight$", [2, -1], [[32], -1], 'leave "shape" out'),
    ],
)
def test_parts_that_the_models_forward_would_take_for_others_are_refused(
    model: Any, pattern: str, wrong: list[Any] | None, right: list[Any] | None, said: str
) -> None:
    """DeepSpeed's example of custom patterns does so to GPT-NeoX, whose heads have query, key and value together. The
    numbers were others, in silence."""
    made = model(
        model.config_class(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=64, pad_token_id=0,
        )
    )  # fmt: skip
    if model is Phi3ForCausalLM:  # its own plan gathers what this layer gives, and says nothing of parts
        made._tp_plan = {"model.layers.*.mlp.gate_up_proj": "packed_colwise"}
    with pytest.raises(ConfigError, match=rf"and the plan of {model.__name__} cuts(?s:.*){said}") as caught:
        plan_division(made, rules(pattern, wrong), 2)
    assert [fault.pointer for fault in caught.value.faults] == ["/tensor_parallel/partition_config/layer_specs/0"]
    assert any(division.parts for division in plan_division(made, rules(pattern, right), 2))


def test_a_preset_of_another_layout_is_named() -> None:
    made = GPTNeoXForCausalLM(
        GPTNeoXForCausalLM.config_class(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
        )
    )
    made._tp_plan = {"gpt_neox.layers.*.mlp.dense_h_to_4h": "packed_colwise"}
    section = TensorParallelSection(autotp_size=2, preset_model="bloom")
    with pytest.raises(ConfigError, match="the model's own plan divides it") as caught:
        plan_division(made, section, 2)
    assert [fault.pointer for fault in caught.value.faults] == ["/tensor_parallel/preset_model"]


def test_adapters_of_parameters_are_refused() -> None:
    """The plan of experts found PEFT's wrapper around them: they stayed whole, and were summed all the same."""
    import peft

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts)
    wrapped = peft.get_peft_model(build("mixtral"), adapted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mlp\.experts has an adapter of a parameter(?s:.*)expert_parallel"):
        plan_division(wrapped, TensorParallelSection(), 2)
