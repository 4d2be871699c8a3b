"""What moves tokens between places: gradients, twice where models may ask for it."""

from __future__ import annotations

import torch

from ds_hf.engine.ops.routes import group, group_by_process
from ds_hf.engine.parallel.experts.exchange import add_up, label, pick, take

EXPERTS = torch.tensor([[2, 0], [3, 3], [1, 3], [0, 2]])  # 3: elsewhere


def test_gradients_of_take_and_add_up() -> None:
    items = group(EXPERTS, 3).first(5)
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    routes = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for function, x in ((take, rows), (add_up, routes)):
        assert torch.autograd.gradcheck(lambda each, f=function: f(each, items), (x,))
        assert torch.autograd.gradgradcheck(lambda each, f=function: f(each, items).pow(2), (x,))


def test_sums_are_those_of_the_items_of_each_place() -> None:
    items = group(EXPERTS, 3).first(5)
    assert items.place.tolist() == [0, 3, 2, 0, 3]
    assert add_up(torch.arange(5.0)[:, None], items).flatten().tolist() == [0 + 3, 0, 2, 1 + 4]
    assert add_up(torch.zeros(0, 2), group(torch.full((3, 2), 7), 3).first(0)).tolist() == [[0.0, 0.0]] * 3


def test_gradients_of_weights() -> None:
    items = group(EXPERTS, 3).first(5)
    values = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: pick(each, items, 2, 1), (values,))
    rows = group_by_process(EXPERTS, 1, 1, 3)
    rows = rows.first(int(rows.totals[:, 0].sum()))
    weights = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: label(each, EXPERTS, rows, 1, 1)[:, 2:], (weights,))
