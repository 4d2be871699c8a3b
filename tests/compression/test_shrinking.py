"""What cannot be cut without becoming another model is refused before training; what can computes as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Olmo2Config,
    Olmo2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ds_hf.compression import init_compression, redundancy_clean
from ds_hf.compression.schedule import schedule_of
from ds_hf.errors import ConfigError
from tests.compression.common import config, logged, method

HALF = {"dense_ratio": 0.5}
WIDTHS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
QKV = ["q_proj", "k_proj", "v_proj"]
BERT_MLP = (["intermediate.dense"], [[r"layer.\d.output.dense"]])


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**WIDTHS, "num_key_value_heads": 2, **more}))


def bert(act: str = "gelu") -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(**WIDTHS, hidden_act=act))


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    )


def adapted(**options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    made: nn.Module = get_peft_model(llama(), LoraConfig(target_modules=["up_proj"], **options))
    return made


def hadamard() -> nn.Module:
    from peft import HiraConfig, get_peft_model

    made: nn.Module = get_peft_model(llama(), HiraConfig(target_modules=["up_proj"]))
    return made


def images(groups: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=groups))


def normed_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def rows(modules: list[str], related: list[list[str]]) -> dict[str, Any]:
    return {"row_pruning": method(HALF, modules, related)}


def heads(modules: list[str], related: list[str], count: int = 4) -> dict[str, Any]:
    return {"head_pruning": method(HALF, modules, [related], method="l1", num_heads=count)}


@pytest.mark.parametrize(
    ("make", "section", "words"),
    [
        (llama, rows(["gate_proj"], [["down_proj"]]), "up_proj stands beside .*gate_proj"),
        (llama, rows(["gate_proj", "up_proj"], [["down_proj"]] * 2), "of .*down_proj the inputs would be cut twice"),
        (llama, rows(["gate_proj", "mlp.gate"], [["up_proj", "down_proj"]] * 2), "would be cut twice"),
        (llama, rows(["v_proj"], [["k_proj"]]), "v_proj makes queries, keys or values"),
        (lambda: llama(hidden_act="sigmoid"), rows(["gate_proj"], [["up_proj", "down_proj"]]), "makes 0.5 of zeros"),
        (lambda: bert("sigmoid"), rows(*BERT_MLP), "makes 0.5 of zeros"),
        (adapted, rows(["gate_proj"], [["up_proj", "down_proj"]]), "up_proj.base_layer has an adapter"),
        (lambda: adapted(use_dora=True), {"sparse_pruning": method(HALF, ["up_proj"])}, "DoRA of .*up_proj computes"),
        (hadamard, {"sparse_pruning": method(HALF, ["up_proj"])}, "HiRA of .*up_proj computes with the weight as it"),
        (llama, heads(["o_proj"], ["q_proj", "k_proj"], 2), "v_proj makes heads as well"),
        (llama, heads(["o_proj"], ["k_proj", "v_proj"], 2), "q_proj makes heads as well"),
        (
            lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**WIDTHS)),
            heads(["attention.dense"], ["query_key_value"]),
            "in an order that cannot be told",
        ),
        (lambda: Olmo2ForCausalLM(Olmo2Config(**WIDTHS)), heads(["o_proj"], QKV), "q_norm is over the values of all"),
        (t5, heads(["SelfAttention.o"], [f"SelfAttention.{x}" for x in "qkv"]), "relative_attention_bias has values"),
        (
            lambda: llama(num_hidden_layers=2),
            rows(["layers.0.mlp.up_proj"], [["layers.1.mlp.gate_proj", "layers.1.mlp.down_proj"]]),
            "layers.1.mlp.gate_proj is of another block than .*0.mlp.up_proj, which has .*layers.0.mlp.gate_proj",
        ),
        (llama, rows(["down_proj"], [["q_proj"]]), "down_proj writes into what all blocks read and add to"),
        (normed_images, {"channel_pruning": method(HALF, ["0"], [["3"]])}, "1 is over the channels of 0"),
        (lambda: images(2), {"channel_pruning": method(HALF, ["0"], [["1"]])}, "1 is a convolution of 2 groups"),
    ],
)
def test_what_would_be_another_model_is_refused(
    make: Callable[[], nn.Module], section: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        init_compression(make(), config(section))
    assert all(fault.fix for fault in caught.value.faults)


class LateNorms(nn.Module):
    """Its norms are declared after both convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.first, self.second, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.second(self.two(self.first(self.one(x)).relu())).relu())
        return found


@torch.no_grad()
def test_norms_need_not_stand_beside_their_convolutions() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(LateNorms()).eval()
    x = torch.randn(2, 4, 5, 5)
    init_compression(model, config({"channel_pruning": method(HALF, ["two"], [["second", "last"]])}))
    found: Any = schedule_of(model)
    found.go_to(10)
    before = model(x)
    small = redundancy_clean(model)
    assert small[0].two.out_channels == 4
    assert torch.allclose(small(x), before, atol=1e-5)


def outputs(model: Any) -> Tensor:
    ids = torch.arange(24).view(2, 12)
    found: Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize(
    ("make", "section"),
    [
        (llama, rows(["up_proj"], [["gate_proj", "down_proj"]])),
        (lambda: llama(hidden_act="relu", mlp_bias=True), rows(["gate_proj"], [["down_proj", "up_proj"]])),
        (lambda: llama(attention_bias=True), heads(["o_proj"], QKV, 2)),
        (lambda: Olmo2ForCausalLM(Olmo2Config(**WIDTHS)), heads(["o_proj"], QKV)),
        (bert, rows(*BERT_MLP)),
        (bert, heads(["attention.output.dense"], ["self.query", "self.key", "self.value"])),
    ],
)
@torch.no_grad()
def test_what_is_cut_computes_as_with_zeros(make: Callable[[], nn.Module], section: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Any = make().eval()
    for param in model.parameters():
        param.copy_(torch.randn(param.shape) * 0.2)
    if isinstance(model, Olmo2ForCausalLM):  # its norms are over all heads: zeros it can have
        del section["head_pruning"]["different_groups"]["one"]["related_modules"]
    init_compression(model, config(section))
    found: Any = schedule_of(model)
    found.go_to(10)
    before = outputs(model)
    assert (before - outputs(redundancy_clean(model))).abs().max() < 1e-5 * before.abs().max() + 1e-5


@torch.no_grad()
def test_rows_of_a_tower_as_many_as_another_tower_is_wide() -> None:
    """LLaVA: the MLP of CLIP has 4,096 rows, and Llama is 4,096 wide."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config_of = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**{**WIDTHS, "hidden_size": 32}))
    model = LlavaForConditionalGeneration(config_of).eval()
    init_compression(model, config(rows(["vision_tower.*fc1"], [["vision_tower.*fc2"]])))
    found: Any = schedule_of(model)
    found.go_to(10)
    image = torch.randn(1, 3, 8, 8)
    before = model.model.vision_tower(image).last_hidden_state
    tower = redundancy_clean(model).model.vision_tower
    assert [tuple(layer.mlp.fc1.weight.shape) for layer in tower.encoder.layers] == [(16, 16)] * 2
    torch.testing.assert_close(tower(image).last_hidden_state, before, atol=1e-5, rtol=1e-5)


def test_a_shared_weight_has_one_way() -> None:
    both = {"weight_quantization": method({"target_bits": 4}, ["embed_tokens"])}
    with logged() as lines:
        init_compression(llama(tie_word_embeddings=True), config(both))
    assert any("lm_head shares its weight" in line for line in lines)
    pruned = {**both, "sparse_pruning": method(HALF, ["lm_head"])}
    with pytest.raises(ConfigError, match="embed_tokens and lm_head share a weight"):
        init_compression(llama(tie_word_embeddings=True), config(pruned))
    init_compression(llama(), config(pruned))
    init_compression(
        llama(tie_word_embeddings=True), config({"weight_quantization": method({"target_bits": 4}, ["embed", "head"])})
    )
