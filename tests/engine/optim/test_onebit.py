"""1-bit Adam, 0/1 Adam and 1-bit LAMB without an engine: each step against plain formulas; the exchange."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.ops.blocks import BlockFormat
from ds_hf.engine.optim.onebit.adam import OnebitAdam
from ds_hf.engine.optim.onebit.exchange import OneBitExchange
from ds_hf.engine.optim.onebit.lamb import OnebitLamb
from ds_hf.engine.optim.onebit.zero_one import ZeroOneAdam
from tests.helpers.distributed import run_distributed

BETA1, BETA2, EPS, LR, DECAY = 0.9, 0.99, 1e-6, 0.01, 0.1
SETTINGS: dict[str, Any] = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(optimizer_type: Any, steps: int, **settings: Any) -> tuple[nn.Parameter, Any]:
    param = nn.Parameter(values(30, 7))
    optimizer = optimizer_type([param], **SETTINGS, **settings)
    for step in range(steps):
        param.grad = values(30, 7, seed=step + 1)
        optimizer.step()
    return param, optimizer


def adam(steps: int, freeze: int, first: Any = None) -> Tensor:
    """Adam without bias correction, whose second moment is frozen after ``freeze`` steps."""
    p, m, v = values(30, 7), torch.zeros(30, 7), torch.zeros(30, 7)
    for step in range(steps):
        g = values(30, 7, seed=step + 1)
        if first is None or first(step + 1):
            v = v if step >= freeze else BETA2 * v + (1 - BETA2) * g * g
        m = BETA1 * m + (1 - BETA1) * g
        p = p - LR * (m / (v.sqrt() + EPS) + DECAY * p)
    return p


def test_adam_in_one_process_freezes_the_second_moment() -> None:
    for freeze in (2, 100):
        param, optimizer = run(OnebitAdam, 6, freeze_step=freeze)
        torch.testing.assert_close(param.data, adam(6, freeze), rtol=1e-5, atol=1e-6)
        assert optimizer.state[param]["step"] == 6
        assert optimizer.adam_freeze_key is (freeze == 2)
        assert optimizer.reduces is (freeze != 2)


def test_zero_one_adam_updates_the_second_moment_in_rarer_steps() -> None:
    param, optimizer = run(ZeroOneAdam, 12, var_update_scaler=2)
    # every step twice, every 2nd twice, every 4th twice, then every 8th
    moved = {1, 2, 4, 6, 8, 12}
    torch.testing.assert_close(param.data, adam(12, 100, lambda step: step in moved), rtol=1e-5, atol=1e-6)
    state = optimizer.state[param]
    assert (state["var_interval"], state["var_counter"], state["frozen"]) == (8, 0, False)
    assert not optimizer.reduces
    for step in range(12, 15):
        param.grad = values(30, 7, seed=step + 1)
        optimizer.step()
    assert optimizer.reduces  # for the 16th


def test_zero_one_adam_meets_after_more_and_more_steps() -> None:
    param, optimizer = run(ZeroOneAdam, 3, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4)
    state = optimizer.state[param]
    assert state["frozen"]
    assert not optimizer.reduces
    intervals = []
    for step in range(3, 12):
        param.grad = values(30, 7, seed=step + 1)
        optimizer.step()
        intervals.append((state["local_step_interval"], state["lrs"] > 0))
    assert [each for each, _ in intervals] == [1, 2, 2, 4, 4, 4, 4, 4, 4]
    # steps 4 and 5 meet each time, 6 at the end of two, then 8 and 12 of four
    assert [apart for _, apart in intervals] == [False, False, False, True, False, True, True, True, False]


def lamb_ratio(weight: Tensor, update: Tensor) -> float:
    return min(max(float(weight.norm() / update.norm()), 0.01), 10.0)


def test_lamb() -> None:
    param, optimizer = run(OnebitLamb, 5, freeze_step=3)
    p, m, v = values(30, 7), torch.zeros(30, 7), torch.zeros(30, 7)
    kept, factor = 0.0, 1.0
    for step in range(5):
        g, last = values(30, 7, seed=step + 1), m
        m = BETA1 * m + (1 - BETA1) * g
        if step < 3:
            v = BETA2 * v + (1 - BETA2) * g * g
            fresh = v
            update = m / (v.sqrt() + EPS) + DECAY * p
            ratio = lamb_ratio(p, update)
            kept = 0.9 * kept + 0.1 * ratio
        else:
            seen = (m - BETA1 * last) / (1 - BETA1)
            fresh = BETA2 * fresh + (1 - BETA2) * seen * seen
            adam_part = m / (v.sqrt() + EPS)
            update = adam_part + DECAY * p
            wanted = float(((v.sqrt() + EPS) / (fresh.sqrt() + EPS)).max())
            share = min(1.0, float(adam_part.norm() / update.norm()))
            wanted = min(max(wanted * share + 1 - share, 0.5), 4.0)
            factor = min(max(wanted, factor * 0.9), factor * 1.1)
            ratio = kept * factor
        p = p - LR * ratio * update
        if step == 4:
            assert optimizer.get_lamb_coeffs() == pytest.approx([ratio], rel=1e-4)
    torch.testing.assert_close(param.data, p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer_type", [OnebitAdam, ZeroOneAdam, OnebitLamb])
def test_wrong_arguments(optimizer_type: Any) -> None:
    param = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="AMSGrad"):
        optimizer_type([param], amsgrad=True)
    with pytest.raises(ValueError, match="lr must not be negative"):
        optimizer_type([param], lr=-1)
    with pytest.raises(ValueError, match="betas"):
        optimizer_type([param], betas=(1.0, 0.9))


@pytest.mark.parametrize(
    ("given", "word"), [({"coeff_beta": 2.0}, "coeff_beta"), ({"factor_min": 5.0, "factor_max": 0.1}, "factor_min")]
)
def test_wrong_arguments_of_lamb(given: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        OnebitLamb([nn.Parameter(torch.ones(3))], **given)


# -- several processes ---------------------------------------------------------------------------------------------


def exchange(n: int, rounds: int) -> tuple[Tensor, Tensor, Tensor, Tensor, set[tuple[int, ...]]]:
    axis, device = axis_of(None), torch.device("cpu")
    done = OneBitExchange(axis)
    sent, wanted = torch.zeros(n), torch.zeros(n)
    first = torch.zeros(n)
    memory = set()
    for step in range(rounds):
        everyone = [values(n, seed=1000 * step + rank) + values(n, seed=-1) for rank in range(axis.world_size)]
        done.values(n, device).copy_(everyone[axis.rank])
        means = done.mean("a", n, device)
        mean = drive(means)
        sent += mean
        wanted += torch.stack(everyone).mean(0)
        if step == 0:
            first = mean.clone()
        kept = done.kept("a", n, device)
        memory.add(tuple(each.data_ptr() for each in (mean, kept.worker_errors, kept.server_error, kept.sent)))
    done.owed("a", n, device)
    return first, sent, wanted, kept.worker_error.clone(), memory


def drive(steps: Generator[None, None, Tensor]) -> Tensor:
    """What ``steps`` returns."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]


@pytest.mark.parametrize(("world", "n"), [(2, 5000), (3, 1), (4, 4097)])
def test_exchange(world: int, n: int) -> None:
    found = run_distributed(exchange, world, n, 30)
    first, sent, wanted, owed, memory = found[0]
    assert len(memory) == 1  # nothing is allocated after the first step
    for other in found[1:]:
        assert torch.equal(other[0], first)  # all have the same means, and owe the same
        assert torch.equal(other[1], sent)
        assert torch.equal(other[3], owed)
    torch.testing.assert_close(sent + owed, wanted, rtol=1e-4, atol=1e-3)
    # the first mean, as two roundings make it
    part = -(-n // (64 * world)) * 64
    form = BlockFormat(1, 4096)
    rows = [
        torch.nn.functional.pad(values(n, seed=rank) + values(n, seed=-1), (0, world * part - n))
        for rank in range(world)
    ]
    kept = [form.read(form.write(row.view(world, part)), torch.empty(world, part)) for row in rows]
    again = torch.stack(kept).sum(0) / world
    final = form.read(form.write(again), torch.empty(world, part)).view(-1)[:n]
    torch.testing.assert_close(first, final, rtol=1e-5, atol=1e-6)


def masked(flat: bool) -> Tensor:
    """Two rows that no process has a gradient for."""
    param = nn.Parameter(values(6, 50))
    mask = torch.ones(6, 50)
    mask[4:] = 0
    given = mask.flatten() if flat else mask  # as DeepSpeed takes it for fp16
    optimizer = OnebitAdam([{"params": [param], "exp_avg_mask": given}], lr=0.1, freeze_step=1)
    for step in range(4):
        param.grad = values(6, 50, seed=10 * step + (dist.get_rank() if step else 0)) * mask
        optimizer.step()
    return param.data


@pytest.mark.parametrize("flat", [False, True])
def test_a_mask_keeps_rows_without_gradients(flat: bool) -> None:
    one, other = run_distributed(masked, 2, flat)
    assert torch.equal(one, other)
    assert torch.equal(one[4:], values(6, 50)[4:])
    assert not torch.equal(one[:4], values(6, 50)[:4])


def kept_full() -> tuple[Tensor, list[str]]:
    frozen, full = nn.Parameter(values(70)), nn.Parameter(values(70, seed=5))
    groups = [{"params": [frozen]}, {"params": [full], "non_freeze": True}]
    optimizer = OnebitAdam(groups, **SETTINGS, freeze_step=1)
    for step in range(4):
        for index, param in enumerate((frozen, full)):
            param.grad = values(70, seed=100 * step + 10 * index + (dist.get_rank() if step else 0))
        optimizer.step()
    return full.data, sorted(optimizer.state[full])


def test_a_group_that_is_not_to_be_frozen_is_plain_adam() -> None:
    p, m, v = values(70, seed=5), torch.zeros(70), torch.zeros(70)
    for step in range(4):
        g = torch.stack([values(70, seed=100 * step + 10 + (rank if step else 0)) for rank in range(2)]).mean(0)
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        p = p - LR * (m / (v.sqrt() + EPS) + DECAY * p)
    for found, state in run_distributed(kept_full, 2):
        torch.testing.assert_close(found, p, rtol=1e-5, atol=1e-6)
        assert state == ["exp_avg", "exp_avg_sq", "step"]


def never_used() -> tuple[Tensor, Tensor]:
    """A parameter without gradients shares blocks with one that has them; one more gets its first after the warm-up."""
    used, unused, late = (nn.Parameter(values(70, seed=seed)) for seed in (1, 2, 3))
    optimizer = OnebitAdam([used, unused, late], lr=0.1, betas=(BETA1, BETA2), freeze_step=2)
    for step in range(5):
        used.grad = values(70, seed=10 * step + (dist.get_rank() if step >= 2 else 0))
        unused.grad = torch.zeros(70)
        late.grad = torch.ones(70) * (step >= 3)
        optimizer.step()
    assert used.isfinite().all()
    assert (used - values(70, seed=1)).abs().max() < 5
    return unused.data, late.data


def test_what_never_had_a_gradient_stays() -> None:
    for unused, late in run_distributed(never_used, 2):
        assert torch.equal(unused, values(70, seed=2))
        assert torch.equal(late, values(70, seed=3))
