"""Rules of a file that a model's forward does not fit are refused at the first call, with the rule that fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf.config import load_config
from ds_hf.engine.parallel.tensor.divide import divide_without_values
from ds_hf.engine.parallel.tensor.tried import attach
from ds_hf.errors import ConfigError
from tests.helpers.tensor import WIDTH, Fused, build


def spec(pattern: str, how: str, shape: Any = None) -> dict[str, Any]:
    return {"patterns": [pattern], "partition_type": how, **({} if shape is None else {"shape": shape})}


def divided(kind: str, *specs: dict[str, Any]) -> nn.Module:
    """Without values: what is tried out reads none of cut layers."""
    with torch.device("meta"):
        model = Fused() if kind == "fused" else build(kind)
    partition = {"use_default_specs": False, "layer_specs": list(specs)}
    settings = load_config(
        {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2, "partition_config": partition}}, check_batch=False
    )
    divide_without_values(model, 2, settings.tensor_parallel)
    attach(SimpleNamespace(module=model, settings=settings))
    return model


def fits(module: Any, *args: Any, **kwargs: Any) -> None:
    """A call that is tried out first. The real one has no processes, or values, to compute with."""
    drawn = torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        module(*args, **kwargs)
    assert not isinstance(caught.value, ConfigError)
    assert torch.equal(drawn, torch.get_rng_state())


def turned(width: int = 4) -> dict[str, Any]:
    return {"position_embeddings": (torch.ones(1, 3, width), torch.zeros(1, 3, width)), "attention_mask": None}


GATE_UP, QKV = r".*gate_up_proj\.weight$", r".*qkv_proj\.weight$"
DOWN, OUT = spec(r".*down_proj\.weight$", "row"), spec(r".*o_proj\.weight$", "row")


@pytest.mark.parametrize(
    ("specs", "module", "fix"),
    [
        ((spec(GATE_UP, "column"), DOWN), "mlp", r'gate_up_proj "shape": \[2, -1\]'),
        ((spec(QKV, "column"), OUT), "self_attn", r'qkv_proj "shape": \[\[32, 16, 16\], -1\]'),
        ((spec(QKV, "column", [2, -1]), OUT), "self_attn", r'qkv_proj "shape": \[\[32, 16, 16\], -1\]'),
        ((DOWN,), "mlp", "leave these layers whole"),
        ((spec(GATE_UP, "column", [2, -1]),), "mlp", "leave these layers whole"),
    ],
    ids=["halves of gate and up", "halves of queries and keys", "two parts of three", "no columns", "no rows"],
)
def test_parts_that_are_read_otherwise_are_refused(specs: Any, module: str, fix: str) -> None:
    """Numbers were others than those of one process, in silence, or an error of a product's shapes."""
    layer: Any = divided("phi3", *specs).get_submodule(f"model.layers.0.{module}")
    with pytest.raises(ConfigError, match=rf"layers\.0\.{module} \(a Phi3(?s:.*){fix}"):
        layer(torch.rand(2, 3, WIDTH), **(turned() if module == "self_attn" else {}))


def test_a_layer_of_its_own_kind_of_parts_is_told_to_have_them() -> None:
    """Bloom has each head's query, key and value together."""
    wrong = spec(r".*query_key_value\.weight$", "column", [3, -1])
    model: Any = divided("Bloom", wrong, spec(r".*self_attention\.dense\.weight$", "row"))
    hidden, alibi = torch.rand(2, 3, WIDTH), torch.zeros(2 * 8, 1, 3)
    with pytest.raises(ConfigError, match='leave "shape" out of the rule for transformer'):
        model.transformer.h[0].self_attention(hidden, hidden, alibi=alibi, attention_mask=torch.zeros(2, 1, 3, 3))


def test_what_fits_is_tried_once_and_leaves_no_traces() -> None:
    model: Any = divided("phi3", spec(GATE_UP, "column", [2, -1]), DOWN, spec(QKV, "column", [[32, 16, 16], -1]), OUT)
    block, second = model.model.layers[0], model.model.layers[1]
    block.train()
    seen = [[*each._forward_pre_hooks] for each in (block.mlp, block.self_attn, second.mlp, second.self_attn)]
    assert [len(each) for each in seen] == [1, 1, 0, 0]
    children = [*block.modules()]
    fits(block.mlp, torch.rand(2, 3, WIDTH))
    fits(block.self_attn, torch.rand(2, 3, WIDTH), **turned())
    assert not block.mlp._forward_pre_hooks
    assert not block.self_attn._forward_pre_hooks
    assert [*block.modules()] == children
    assert all(each.training for each in children)
    assert block.self_attn.config.num_attention_heads == 4  # of eight, of this process


def test_layers_that_belong_to_one_another_further_apart_are_tried_together() -> None:
    """OPT's MLP lies in the block beside its attention, which is tried by itself, and not inside of that trial."""
    rules = [spec(r".*(q|k|v)_proj\.weight$", "column"), spec(r".*out_proj\.weight$", "row")]
    model: Any = divided("OPT", *rules, spec(r".*fc1\.weight$", "column"), spec(r".*fc2\.weight$", "row"))
    decoder = model.model.decoder.layers
    assert len(decoder[0]._forward_pre_hooks) == len(decoder[0].self_attn._forward_pre_hooks) == 1
    real = decoder[0].to_empty(device="cpu")
    for param in real.parameters():
        nn.init.normal_(param)
    fits(real, torch.rand(2, 3, WIDTH), attention_mask=None)
    assert not real._forward_pre_hooks


def test_what_cannot_be_tried_is_taken_at_its_word_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Rules that would be refused, and a forward that ends in an error by itself."""
    mlp: Any = divided("phi3", spec(GATE_UP, "column"), DOWN).get_submodule("model.layers.0.mlp")
    mlp.activation_fn.forward = lambda gate: gate.view(-1, 7, 11)
    with caplog.at_level("INFO", "ds_hf"):
        fits(mlp, torch.rand(2, 3, WIDTH))
    assert "model.layers.0.mlp: the rules for its layers are taken at their word" in caplog.text
