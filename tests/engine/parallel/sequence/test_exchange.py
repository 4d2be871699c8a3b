"""The exchange of heads for tokens, value by value, its gradients, and which heads go where."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.sequence.exchange import Exchange, exchange
from ds_hf.engine.parallel.sequence.heads import HeadPlan, gather_tokens, plan_heads, scatter_tokens, shares_of
from ds_hf.engine.parallel.sequence.losses import gather, mean_over_tokens
from tests.helpers.distributed import run_distributed


def whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def pieces(tensor: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    return tensor.split(list(sizes), dim)[dist.get_rank()]


def exchanged() -> list[int]:
    """Tokens for heads and back: values, gradients, and collectives issued."""
    axis, n = axis_of(None, "sequence"), dist.get_world_size()
    full = [whole(2, 2 * n, 3 * n, 5), whole(2, n, 3 * n, 7, seed=1)]
    mine = [part(each, 2) for each in full]
    count = axis.log.count
    out = exchange(mine, Exchange(cut=1, join=2), axis, "test")
    counts = [axis.log.count - count]
    for got, each in zip(out, full, strict=True):
        assert torch.equal(got, part(each, 1))
    weights = [whole(*each.shape, seed=9) for each in full]
    total = sum((got * part(weight, 1).detach()).sum() for got, weight in zip(out, weights, strict=True))
    assert isinstance(total, Tensor)
    total.backward()
    counts.append(axis.log.count - count)
    for each, weight in zip(mine, weights, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, part(weight, 2))
    (back,) = exchange(out[:1], Exchange(cut=2, join=1), axis, "test")
    assert torch.equal(back, part(full[0], 2))
    return counts


@pytest.mark.parametrize("processes", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_one_all_to_all_exchanges_all_tensors(processes: int) -> None:
    assert run_distributed(exchanged, processes) == [[1, 2]] * processes


def uneven() -> None:
    axis, n = axis_of(None, "sequence"), dist.get_world_size()
    sizes = tuple(range(1, n + 1))
    full = whole(2 * n, 3, sum(sizes), 4)
    mine = part(full, 0)
    way = Exchange(cut=2, join=0, cut_sizes=sizes)
    (got,) = exchange([mine], way, axis, "test")
    assert torch.equal(got, pieces(full, sizes, 2))
    (back,) = exchange([got], way.back, axis, "test")
    assert torch.equal(back, mine)
    weight = whole(*full.shape, seed=3)
    (back * part(weight, 0).detach()).sum().backward()
    assert mine.grad is not None
    assert torch.equal(mine.grad, part(weight, 0))
    with pytest.raises(ValueError, match="does not divide into"):
        exchange([mine], Exchange(cut=2, join=0, cut_sizes=(1,) * n), axis, "test")


def test_pieces_of_different_sizes() -> None:
    run_distributed(uneven, 3)


def attended(heads: int, kv_heads: int) -> float:
    """Largest difference of divided attention and its gradients from whole attention."""
    axis, n = axis_of(None, "sequence"), dist.get_world_size()
    tokens = 4 * n
    full = [whole(2, h, tokens, 8, seed=h).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    groups = heads // kv_heads
    expected = sdpa(full[0], *(each.repeat_interleave(groups, 1) for each in full[1:])).transpose(1, 2)
    weight = whole(*expected.shape, seed=77)
    (expected * weight).sum().backward()
    mine = [part(each.detach(), 2) for each in full]
    query, key, value, groups = gather_tokens(*mine, axis, "test")
    context = sdpa(query, *(each.repeat_interleave(groups, 1) for each in (key, value))).transpose(1, 2)
    got = scatter_tokens(context, axis, "test")
    (got * part(weight, 1).detach()).sum().backward()
    differences = [(got - part(expected.detach(), 1)).abs().max()]
    for each, reference in zip(mine, full, strict=True):
        assert each.grad is not None
        assert reference.grad is not None
        differences.append((each.grad - part(reference.grad, 2)).abs().max())
    return float(torch.stack(differences).max())


def attended_each(cases: list[tuple[int, int]]) -> float:
    return max(attended(*case) for case in cases)


def test_attention_over_divided_heads() -> None:
    assert max(run_distributed(attended_each, 2, [(4, 4), (4, 1), (6, 3)])) < 1e-12


@pytest.mark.slow
def test_fewer_key_heads_than_processes() -> None:
    assert max(run_distributed(attended_each, 4, [(4, 2), (8, 2), (12, 3)])) < 1e-12


def test_which_heads_are_computed_where() -> None:
    assert plan_heads(8, 8, 4) == HeadPlan(repeats=1, groups=1)
    assert plan_heads(32, 8, 4) == HeadPlan(repeats=1, groups=4)
    assert plan_heads(32, 8, 16) == HeadPlan(repeats=2, groups=2)
    assert plan_heads(32, 1, 8) == HeadPlan(repeats=8, groups=4)
    assert plan_heads(6, 3, 2) == HeadPlan(repeats=2, groups=1)  # 3 key heads cannot be divided: each goes twice
    with pytest.raises(ValueError, match=r"Attention head count 6 is not divisible by SP size 4.* one of 1, 2, 3, 6$"):
        plan_heads(6, 3, 4)
    assert shares_of(12, 6, 4) == (4, 4, 2, 2)
    with pytest.raises(ValueError, match="must be at least the sequence parallel size"):
        shares_of(12, 2, 4)


def losses() -> float:
    """The loss of a whole sequence from its parts, one of which counts no tokens, and its gradient."""
    axis, rank = axis_of(None, "sequence"), dist.get_rank()
    values = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([]), torch.tensor([5.0])][rank].requires_grad_()
    loss = mean_over_tokens(values.mean(), torch.tensor(len(values)), axis)
    assert loss.item() == 3.5
    loss.backward()
    assert values.grad is not None
    assert torch.equal(values.grad, torch.full_like(values, 3 * 0.25))  # of three processes whose mean is taken
    joined = gather(torch.full((2,), float(rank), requires_grad=True), axis)
    return float(joined.sum())


def test_the_mean_over_tokens_of_all_processes() -> None:
    assert run_distributed(losses, 3) == [6.0] * 3
