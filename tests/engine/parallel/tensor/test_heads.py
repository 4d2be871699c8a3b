"""Which layers give heads of keys that neighbours compute together, in models whose attention is not Llama's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ds_hf.config.types.parallel import TensorParallelSection
from ds_hf.engine.parallel.tensor.divide import divide_without_values
from ds_hf.engine.parallel.tensor.plan import plan_division
from ds_hf.errors import ConfigError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "head_dim": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FULL = {"layer_types": ["full_attention"]}


def made(kind: str, text: str = "", **more: Any) -> nn.Module:
    """On the meta device; skips where this version of transformers has no such model."""
    configuration = getattr(transformers, f"{kind}{text}Config", None)
    if configuration is None:
        pytest.skip(f"no {kind}")
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(configuration(**{**SIZES, **more}))
    return model


def shared(model: nn.Module, size: int) -> dict[str, tuple[int, int]]:
    """By layer: how many neighbours compute a head, and for how many queries it is repeated."""
    divisions = plan_division(model, TensorParallelSection(autotp_size=size), size)
    found = {each.name.removeprefix("model.layers."): (each.neighbours, each.repeats) for each in divisions}
    return {name: counts for name, counts in found.items() if "self_attn" in name and "norm" not in name}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Llama", {}), ("Qwen3Next", FULL), ("Laguna", {"head_dim": 8})],  # the last have gates of queries, and of heads
)
def test_keys_are_shared_and_not_queries_or_their_gates(kind: str, more: dict[str, Any]) -> None:
    found = shared(made(kind, num_key_value_heads=2, **more), 4)
    assert {name: counts for name, counts in found.items() if name[-6] in "kv"} == {
        "0.self_attn.k_proj": (2, 2),
        "0.self_attn.v_proj": (2, 2),
    }
    rest = [name for name in found if name[-6] not in "kv"]
    assert {"0.self_attn.q_proj", "0.self_attn.o_proj"} <= set(rest)
    assert all(found[name] == (1, 2) for name in rest)


def test_layers_have_numbers_of_heads_of_their_own_and_keys_of_other_layers() -> None:
    """Gemma 4: four heads of keys in sliding layers and one in the others, whose values are their keys; the last two
    layers attend to keys of those before."""
    model: Any = made(
        "Gemma4",
        "Text",
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        global_head_dim=8,
        attention_k_eq_v=True,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    )
    found = shared(model, 4)
    assert {name: counts for name, counts in found.items() if counts != (1, 0)} == {
        "1.self_attn.q_proj": (1, 2),
        "1.self_attn.k_proj": (4, 2),
        "1.self_attn.o_proj": (1, 2),
        "3.self_attn.q_proj": (1, 2),
        "3.self_attn.o_proj": (1, 2),
    }
    divide_without_values(model, 4, TensorParallelSection(autotp_size=4))
    assert [layer.self_attn.num_key_value_groups for layer in model.model.layers] == [2, 2, 2, 2]


def repeating() -> nn.Module:
    model: Any = made("Llama", num_key_value_heads=1)
    model.model.layers[0].self_attn.num_key_value_groups = 1
    return model


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        (lambda: made("Laguna", num_key_value_heads=2), "use a tensor-parallel size of 2"),  # its gates are as wide
        (lambda: made("Doge", num_key_value_heads=2), "use a tensor-parallel size of 2"),  # reads what values give
        (repeating, "remove autotp_size"),
        (lambda: made("Llama", num_key_value_heads=3, num_attention_heads=12, hidden_size=48), "of 3 or 6 or 12"),
        (lambda: made("Llama", num_key_value_heads=1, num_attention_heads=6, hidden_size=48), "of 2 or 3 or 6"),
    ],
    ids=["ambiguous", "read", "repeating", "odd", "queries"],
)
def test_what_cannot_be_told_is_refused_with_sizes_that_fit(model: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shared(model(), 4)
    assert "which 4 does not divide" in str(refused.value)
    assert fix in str(refused.value)
