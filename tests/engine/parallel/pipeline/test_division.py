"""Which layers each stage gets, without any process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ds_hf.engine.parallel.pipeline.division import divide_layers, layer_costs
from ds_hf.engine.parallel.pipeline.partition import bounds_of, partition_by_cost
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec, check_apart, tied_keys
from ds_hf.errors import ConfigError
from tests.engine.parallel.pipeline.models import Embedding, specs
from tests.helpers.models import Block


class Untouchable(nn.Module):
    """Tells whether it was built with values."""

    built = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        Untouchable.built += not self.weight.is_meta


def test_layers_are_counted_without_being_built_and_without_random_numbers() -> None:
    built = nn.Linear(2, 2)
    before = torch.get_rng_state()
    costs = layer_costs([LayerSpec(Untouchable, 7), LayerSpec(nn.Linear, 3, 2), torch.relu, built])
    assert Untouchable.built == 0
    assert [cost.trained for cost in costs] == [7, 8, 0, 6]
    assert [cost.name for cost in costs] == ["Untouchable", "Linear", "relu", "Linear"]
    assert torch.equal(before, torch.get_rng_state())


def test_methods() -> None:
    layers = [
        LayerSpec(nn.Linear, 8, 8),
        torch.relu,
        LayerSpec(nn.Linear, 8, 64),
        LayerSpec(nn.LayerNorm, 64),
        torch.sum,
    ]
    assert divide_layers(layers, 2, "uniform").parts == [0, 3, 5]
    assert divide_layers(layers, 2, "parameters").parts == [0, 3, 5]
    assert divide_layers(layers, 2, "type:layernorm|relu").parts == [0, 3, 5]
    assert divide_layers(layers, 2, "Type:Linear").parts == [0, 2, 5]
    assert divide_layers(layers, 2, "memory").parts == [0, 3, 5]


def test_memory_counts_the_micro_batches_in_flight() -> None:
    """Layers are alike; the first stage keeps activations of four micro-batches, the last of one."""
    layers = [LayerSpec(Block, 8) for _ in range(12)]
    alone = divide_layers(layers, 4, "memory")
    assert alone.parts == [0, 3, 6, 9, 12]
    costs = layer_costs(layers, torch.empty(64, 128, 8))
    assert all(cost.activations > 10 * cost.states for cost in costs)
    found = divide_layers(layers, 4, "memory", sample=torch.empty(64, 128, 8)).parts
    sizes = [stop - start for start, stop in itertools.pairwise(found)]
    assert sizes[0] < sizes[-1]
    assert max(size * flight for size, flight in zip(sizes, (4, 3, 2, 1), strict=True)) == 6


def test_a_sample_goes_through_tuples_and_tied_layers() -> None:
    costs = layer_costs(specs(tied=True), torch.empty(2, 6, dtype=torch.int64))
    assert costs[0].trained == 32 * 16
    assert costs[-1].trained == 0  # the first layer's
    assert all(cost.activations > 0 for cost in costs[1:])


def test_chunks_take_turns() -> None:
    division = divide_layers([LayerSpec(nn.Linear, 2, 2)] * 8, 2, "uniform", chunks=2)
    assert division.parts == [0, 2, 4, 6, 8]
    assert division.bounds(0) == [(0, 2), (4, 6)]
    assert division.bounds(1) == bounds_of(division.parts, 2, 1) == [(2, 4), (6, 8)]
    assert [division.stage_of(layer) for layer in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_the_table() -> None:
    text = divide_layers(specs(tied=False), 2, "uniform").table(specs(tied=False))
    assert text.splitlines()[0] == "6 layers on 2 stages by uniform"
    assert "0-2" in text
    assert "2 x Block, Head" in text
    assert "50%" in text


@pytest.mark.parametrize(
    ("method", "stages", "words"),
    [
        ("uniform", 7, "6 layers cannot be divided over 7 stages"),
        ("profile", 2, "there is no partition method 'profile'"),
        ("type:Attention", 2, "no layer's class matches 'Attention': there are Block, Embedding, Head"),
        ("type:(", 2, "not a regular expression"),
    ],
)
def test_what_cannot_be_divided(method: str, stages: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        divide_layers(specs(tied=False), stages, method)
    assert words in str(caught.value)


def test_a_module_that_trains_is_on_one_stage() -> None:
    block, other = Block(8), Block(8)
    layers = [block, other, nn.Identity(), block, lambda x: x]
    check_apart(layers, lambda index: 0)
    with pytest.raises(
        ConfigError, match=r"layers 0 and 3 \(Block\) share the parameter norm.weight, and stages 0 and 1"
    ):
        check_apart(layers, lambda index: index // 3)
    check_apart(layers, lambda index: index // 3, list(block.parameters()))
    block.requires_grad_(False)  # its copies stay alike
    check_apart(layers, lambda index: index // 3)


def test_tied_layers_have_the_same_shapes() -> None:
    assert tied_keys(specs(tied=True)) == {"embed": [0, 5]}
    with pytest.raises(ConfigError, match=r"weight has shape \[32, 16\] in one and \[33, 16\] in the other"):
        tied_keys([TiedLayerSpec("e", Embedding, 32), TiedLayerSpec("e", Embedding, 33)])
    with pytest.raises(ConfigError, match="no weight 'bias'"):
        tied_keys([TiedLayerSpec("e", Embedding, tied_weight_attr="bias")])
    with pytest.raises(RuntimeError, match="LayerSpec takes a class"):
        LayerSpec(torch.relu)  # type: ignore[arg-type]


def test_costs_decide_the_dearest_part() -> None:
    weights = [5, 1, 1, 1, 4]
    assert partition_by_cost(5, 3, lambda part, start, stop: sum(weights[start:stop])) == [0, 1, 4, 5]
