"""Which lists are taken for experts, and what becomes a unit then."""

from __future__ import annotations

import pytest
from torch import nn

from ds_hf.engine.zero.leaf import Choice, find_choices, set_z3_leaf_modules
from ds_hf.engine.zero.planning import make_units


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


class Holder(nn.Module):
    """A module with a forward that holds what it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: object) -> object:
        return x


class SparseMoE(Holder):
    pass


def model(block: nn.Module) -> nn.Module:
    return Holder(embed=nn.Linear(8, 8), middle=block, head=nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("block", "container"),
    [
        (Holder(experts=linears(4)), "experts"),
        (Holder(gate=nn.Linear(8, 3), ffns=linears(4)), "ffns"),
        (Holder(router=nn.Linear(8, 3), ffns=linears(4)), "ffns"),
        (Holder(choose=nn.Linear(8, 4), ffns=linears(4)), "ffns"),
        (SparseMoE(ffns=linears(4)), "ffns"),
        (Holder(heads=nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})), "heads"),
    ],
)
def test_lists_of_experts_are_found_and_their_holder_is_a_leaf(block: nn.Module, container: str) -> None:
    assert find_choices(model(block)) == [Choice(f"middle.{container}", "middle")]
    units = {unit.name: unit for unit in make_units(model(block))}
    assert list(units) == ["", "middle"]
    assert units["middle"].leaf
    assert not units[""].leaf


@pytest.mark.parametrize(
    "block",
    [
        Holder(layers=linears(4)),
        Holder(blocks=linears(4), gate=nn.Linear(8, 4)),  # called in turn, whatever is beside it
        Holder(stack=linears(4), norm=nn.LayerNorm(8)),
        Holder(aggregate=nn.Linear(8, 3), stack=linears(4)),
    ],
)
def test_layers_called_in_turn_are_units_of_their_own(block: nn.Module) -> None:
    assert find_choices(model(block)) == []
    assert len(make_units(model(block))) == 1 + 4


def test_a_model_of_mixtures_is_split_into_them() -> None:
    inner = [Holder(gate=nn.Linear(8, 4), experts=linears(4)) for _ in range(3)]
    whole = SparseMoE(moe_stack=nn.ModuleList(inner), head=nn.Linear(8, 3))
    assert {choice.holder for choice in find_choices(whole)} == {f"moe_stack.{i}" for i in range(3)}
    units = make_units(whole)
    assert [unit.name for unit in units] == ["", "moe_stack.0", "moe_stack.1", "moe_stack.2"]
    assert all(unit.leaf for unit in units[1:])


def test_a_model_that_itself_chooses_keeps_its_experts_with_the_root() -> None:
    whole = Holder(gate=nn.Linear(8, 4), experts=linears(4), body=Holder(layers=linears(3)))
    assert [unit.name for unit in make_units(whole)] == ["", "body.layers.0", "body.layers.1", "body.layers.2"]


def test_a_list_marked_as_a_leaf_is_gathered_by_who_calls_it() -> None:
    whole = Holder(inlet=nn.Linear(8, 8), middle=Holder(ways=linears(3)), layers=linears(2))
    set_z3_leaf_modules(whole.middle, [nn.ModuleList])
    units = {unit.name: unit for unit in make_units(whole)}
    assert set(units) == {"", "middle", "layers.0", "layers.1"}
    assert units["middle"].leaf
    assert len(units["middle"].params) == 6
    set_z3_leaf_modules(whole, [nn.ModuleList])
    assert {unit.name: len(unit.params) for unit in make_units(whole)} == {"": 6, "middle": 6}  # layers with the root


def test_a_model_marked_as_a_leaf_is_one_unit() -> None:
    whole = Holder(layers=linears(4))
    set_z3_leaf_modules(whole, [Holder])
    assert [(unit.name, len(unit.params)) for unit in make_units(whole)] == [("", 8)]
