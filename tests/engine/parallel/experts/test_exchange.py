"""Rows and routes against a loop over tokens; sums and their gradients, twice."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.parallel.experts.exchange import Items, add_up, places_of, routes_here, rows_of, sent_items, take


@pytest.mark.parametrize(("tokens", "size", "k"), [(7, 3, 2), (1, 2, 1), (40, 4, 3), (5, 1, 2), (0, 2, 2)])
def test_rows_are_once_for_each_process_and_routes_once_for_each_expert(tokens: int, size: int, k: int) -> None:
    count = 2
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, size * count + 1, generator=generator).argsort(1)[:, :k]  # the last number: none
    owner = chosen // count
    goes, counts, order = rows_of(owner, size)
    wanted = [sorted({t for t in range(tokens) if p in owner[t].tolist()}) for p in range(size)]
    assert counts[:, 0].tolist() == [len(each) for each in wanted]
    assert counts[:, 1].tolist() == [int((owner == p).sum()) for p in range(size)]
    rows = sent_items(goes, order, int(counts[:, 0].sum()))
    assert rows.place.tolist() == [t for each in wanted for t in each]
    x = torch.randn(len(rows.place), 3, generator=generator)
    total = torch.zeros(tokens, 3).index_add_(0, rows.place, x)
    torch.testing.assert_close(add_up(x, rows), total)


def test_routes_are_sorted_by_expert_and_found_again() -> None:
    experts = torch.tensor([[2, 0], [3, 3], [1, 3], [0, 2]])  # 3: elsewhere
    items, found, at = routes_here(experts, 3, 5)
    assert found.tolist() == [0, 0, 1, 2, 2]
    assert items.place.tolist() == [0, 3, 2, 0, 3]
    assert experts.reshape(-1)[at].tolist() == found.tolist()
    x = torch.arange(5.0)[:, None]
    assert add_up(x, items).flatten().tolist() == [0 + 3, 0, 2, 1 + 4]


def test_gradients_of_take_and_add_up() -> None:
    experts = torch.tensor([[2, 0], [3, 3], [1, 3], [0, 2]])
    items, *_ = routes_here(experts, 3, 5)
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    routes = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for function, x in ((take, rows), (add_up, routes)):
        assert torch.autograd.gradcheck(lambda each, f=function: f(each, items), (x,))
        assert torch.autograd.gradgradcheck(lambda each, f=function: f(each, items).pow(2), (x,))


def test_nothing_adds_up_to_zeros() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    items = Items(empty, empty, torch.zeros(3, dtype=torch.int64))
    assert add_up(torch.zeros(0, 2), items).tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("me", [0, 1, 3])
def test_a_process_is_its_own_last_place(me: int) -> None:
    order = [*(rank for rank in range(4) if rank != me), me, 4]
    assert places_of(torch.tensor([order]), me, 4).tolist() == [[0, 1, 2, 3, 4]]
