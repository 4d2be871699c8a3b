"""Units and flat buffers as they are planned: a pure function of the model, whose answer covers each parameter once."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero import planning
from ds_hf.engine.zero.planning import FROZEN, BufferSpec, UnitPolicy, plan_units, tell_common_memory, tell_lost_format
from ds_hf.engine.zero.replicas import Replicas
from ds_hf.engine.zero.unit import Unit
from tests.engine.zero.zoo import Hierarchy, MixedDtypes, Stack, TiedBlocks, TiedToRoot
from tests.helpers.models import TinyLM

POLICY = UnitPolicy(sharded=True)
EVERYWHERE = Replicas.along(Axis(None, 0, 4))


def plan(model: nn.Module, policy: UnitPolicy = POLICY, **more: Any) -> dict[Unit, list[BufferSpec]]:
    trained = {id(p): 0 for p in model.parameters() if p.requires_grad}
    return plan_units(model, None, policy, more.get("group_of", trained), more.get("replicas_of", lambda _: EVERYWHERE))


def named(model: nn.Module, planned: dict[Unit, list[BufferSpec]]) -> dict[str, list[list[str]]]:
    """By unit: the names of the parameters of each of its buffers."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        unit.name: [[names[id(param)] for param in spec.params] for spec in specs] for unit, specs in planned.items()
    }


@pytest.mark.parametrize("make", [Stack, TinyLM, TiedBlocks, TiedToRoot, Hierarchy, MixedDtypes])
@pytest.mark.parametrize("policy", [POLICY, replace(POLICY, joins=True, whole_below=100, whole_in_all=10_000)])
def test_each_parameter_lies_in_one_buffer(make: Any, policy: UnitPolicy) -> None:
    model = make()
    planned = plan(model, policy)
    counts = Counter(id(param) for specs in planned.values() for spec in specs for param in spec.params)
    assert counts == {id(param): 1 for param in model.parameters()}
    assert next(iter(planned)).name == "", "the root is first"
    for unit, specs in planned.items():
        for spec in specs:
            assert spec.unit == unit.name
            assert spec.numel == sum(param.numel() for param in spec.params)
            assert spec.shapes == tuple(param.shape for param in spec.params)
            assert {param.dtype for param in spec.params} == {spec.dtype}


def test_a_plan_is_the_same_each_time_and_changes_nothing() -> None:
    model = TinyLM()
    before = {name: (param.data_ptr(), dict(vars(param))) for name, param in model.named_parameters()}
    assert named(model, plan(model)) == named(model, plan(model))
    assert before == {name: (param.data_ptr(), dict(vars(param))) for name, param in model.named_parameters()}


def test_blocks_are_units_and_the_rest_is_the_root() -> None:
    model = Stack()
    found = named(model, plan(model))
    block = ["up.weight", "up.bias", "down.weight"]
    assert found == {
        "": [["inlet.weight", "inlet.bias", "outlet.weight", "outlet.bias"]],
        **{f"blocks.{i}": [[f"blocks.{i}.{name}" for name in block]] for i in range(3)},
    }


def test_what_differs_lies_apart() -> None:
    """Frozen, of other replicas, reduced in another dtype; groups of the optimizer lie one after another."""
    model = Stack()
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].down.weight.comm_dtype = torch.bfloat16  # type: ignore[union-attr, assignment]
    few = Replicas.along(Axis(None, 0, 2))
    elsewhere = {id(model.blocks[2].up.bias)}  # type: ignore[union-attr]
    groups = {id(p): 1 if p.dim() > 1 else 0 for p in model.parameters() if p.requires_grad}
    planned = plan(model, group_of=groups, replicas_of=lambda p: few if id(p) in elsewhere else EVERYWHERE)
    found = named(model, planned)
    assert found["blocks.0"] == [["blocks.0.up.weight"], ["blocks.0.up.bias", "blocks.0.down.weight"]]
    assert found["blocks.1"] == [["blocks.1.up.bias", "blocks.1.up.weight"], ["blocks.1.down.weight"]]
    assert found["blocks.2"] == [["blocks.2.up.weight", "blocks.2.down.weight"], ["blocks.2.up.bias"]]
    assert found[""] == [["inlet.bias", "outlet.bias", "inlet.weight", "outlet.weight"]]
    specs = {unit.name: specs for unit, specs in planned.items()}
    assert [spec.trains for spec in specs["blocks.0"]] == [False, True]
    assert [spec.groups for spec in specs["blocks.0"]] == [(FROZEN,), (0, 1)]
    assert specs["blocks.2"][1].replicas == few
    assert specs[""][0].groups == (0, 0, 1, 1)


def test_small_parameters_stay_whole_with_the_root() -> None:
    model = Stack()
    planned = plan(model, replace(POLICY, whole_below=20, whole_in_all=39))
    root = next(iter(planned))
    names = {id(param): name for name, param in model.named_parameters()}
    # 7 + 3 of the root and 15 of the first block; those of the other blocks would be more than 39 together
    assert [names[id(param)] for param in root.whole] == ["inlet.bias", "outlet.bias", "blocks.0.up.bias"]
    assert [spec.sharded for spec in planned[root]] == [True, False]
    assert sum(unit.name.startswith("blocks") for unit in planned) == 3


def test_a_large_leaf_is_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LARGE_LEAF_NUMEL", 48 * 32)
    model = TinyLM()
    found = named(model, plan(model))
    assert "embedding" not in found, "tied to the head, which is another leaf: the root has it"
    untied = TinyLM()
    untied.head = nn.Linear(32, 48, bias=False)
    assert [name for name in named(untied, plan(untied)) if name in ("embedding", "head")] == ["embedding", "head"]


def test_channels_last_is_told_where_it_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Weights became contiguous in silence; where inputs have the format, so have the outputs."""

    def told(model: nn.Module) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ds_hf"):
            tell_lost_format(model)
        return [record.getMessage().partition(" do not keep")[0] for record in caplog.records]

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), nn.Linear(4, 4))
    assert told(model) == []
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert told(model) == ["0.weight and 1 more"]
    assert told(nn.Conv3d(3, 4, 3).to(memory_format=torch.channels_last_3d)) == ["weight"]  # type: ignore[call-overload]
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    contiguous = nn.functional.conv2d(images, model[0].weight.contiguous())
    assert contiguous.is_contiguous(memory_format=torch.channels_last)


def test_parameters_and_buffers_that_change_with_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(change: Any) -> list[str]:
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        change(model["a"], model["b"])
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ds_hf"):
            tell_common_memory(model)
        return [record.getMessage() for record in caplog.records]

    def tied(a: Any, b: Any) -> None:
        a.weight = b.weight

    def apart(a: Any, b: Any) -> None:
        both = torch.zeros(4, 8)
        a.weight.data, b.weight.data = both[:, :4], both[:, 4:]
        a.bias.data, b.bias.data = torch.zeros(2, 4)

    def same(a: Any, b: Any) -> None:
        a.weight.data = b.weight.data

    def frozen(a: Any, b: Any) -> None:
        same(a.requires_grad_(False), b.requires_grad_(False))

    def row(a: Any, b: Any) -> None:
        b.bias.data = a.weight.data[2]

    def kept(a: Any, b: Any) -> None:
        b.register_buffer("start", a.bias.detach())

    assert told(tied) == told(apart) == told(frozen) == []
    assert [text[:60] for text in told(same)] == ["a.weight and b.weight are two parameters in the same memory,"]
    assert "a.weight and b.bias are two parameters" in told(row)[0]
    assert "a.bias and b.start are a parameter and a buffer" in told(kept)[0]


@pytest.mark.parametrize("tying", [False, True])
def test_what_to_do_about_adapters_that_peft_ties(tying: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    both = ["embed_tokens", "lm_head"]
    lora = peft.LoraConfig(r=2, target_modules=both[:1] if tying else both, ensure_weight_tying=tying)
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    with caplog.at_level(logging.WARNING, logger="ds_hf"):
        tell_common_memory(model)
    found = [text for record in caplog.records if "two parameters in the same memory" in (text := record.getMessage())]
    assert ["PEFT's ensure_weight_tying" in text and "name both layers" in text for text in found] == [True] * tying
