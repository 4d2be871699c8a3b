"""What DeepSpeed 0.19.8 decides for the same logits, and what no number of a seed can say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hf.deepspeed_api.moe.gates import TopKGate, multiplicative_jitter, top1gating, top2gating, topkgating
from ds_hf.errors import ConfigError

LOGITS = torch.sin(torch.arange(32.0).mul(1.7).view(8, 4)) * 2

# The loss, how many chose each expert, (token, expert, place): weight, and how many places there are.
DEEPSPEED: dict[str, Any] = {
    "top1, none dropped": (
        lambda: top1gating(LOGITS, 0.5, 1, drop_tokens=False, use_rts=False),
        1.119668,
        [3, 2, 1, 2],
        "010 0.80531, 111 0.605032, 200 0.64269, 301 0.711255, 402 0.525595, 530 0.666156, 631 0.703723, 720 0.47286",
        3,
    ),
    "top2": (
        lambda: top2gating(LOGITS, 0.5, 1, top2_2nd_expert_sampling=False),
        1.119668,
        [6, 3, 2, 5],
        "010 1, 111 1, 200 1, 301 1, 530 1, 621 0.190174, 631 0.809826, 720 1",
        2,
    ),
    "top3, the likeliest": (
        lambda: topkgating(LOGITS, 3, 0.5, 1),
        1.095623,
        [8, 5, 4, 7],
        "010 0.923749, 020 0.076251, 111 1, 200 0.716028, 212 0.283972, 301 1, 402 1, 530 1, 621 0.190174, "
        "631 0.809826, 722 0.510307, 732 0.489693",
        3,
    ),
    "top3, the first": (
        lambda: topkgating(LOGITS, 3, 0.5, 1, drop_policy="position"),
        1.095623,
        [8, 5, 4, 7],
        "000 0.112781, 010 0.819568, 020 0.067651, 101 0.339415, 111 0.623887, 130 0.036698, 202 0.653707, "
        "212 0.259256, 231 0.087037, 332 1, 521 1, 622 1",
        3,
    ),
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_decisions_are_those_of_deepspeed(name: str) -> None:
    decide, loss, chosen, places, capacity = DEEPSPEED[name]
    wanted = torch.zeros(8, 4, capacity)
    for each in places.split(", "):
        place, _, weight = each.partition(" ")
        wanted[tuple(map(int, place))] = float(weight)
    l_aux, weights, mask, counts = decide()
    assert float(l_aux) == pytest.approx(loss, abs=1e-6)
    assert counts.tolist() == chosen
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=0)
    assert torch.equal(mask, wanted > 0)


def test_the_form_of_lists_says_the_same() -> None:
    _, weights, _, _ = topkgating(LOGITS, 3, 0.5, 1)
    _, capacity, count, experts, slots, values, _ = topkgating(LOGITS, 3, 0.5, 1, sparse_routes=True)
    assert (int(capacity), count) == (3, 4)
    again = torch.zeros_like(weights)
    for route, token in (experts >= 0).nonzero().tolist():
        again[token, experts[route, token], slots[route, token]] = values[route, token]
    assert torch.equal(again, weights)


def test_dropped_tokens_are_drawn_and_unused_ones_go_nowhere() -> None:
    logits, used = torch.zeros(400, 2), torch.ones(400)
    logits[:, 0], used[:100] = 1.0, 0.0
    taken = torch.zeros(400)
    for _ in range(40):
        _, _, mask, counts = top1gating(logits, 0.5, 1, used)
        assert (counts.tolist(), int(mask.sum())) == ([300, 0], 100)
        taken += mask.sum((1, 2))
    assert not taken[:100].any()
    assert float(taken[100:200].mean()) == pytest.approx(40 / 3, rel=0.15)


def test_noise_decides_as_often_as_softmax_says_and_only_in_training() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(2000, 3)
    shares = torch.softmax(logits[0], 0)
    _, _, _, counts = top1gating(logits, 1.0, 1, noisy_gate_policy="RSample")
    torch.testing.assert_close(counts / 2000, shares, atol=0.03, rtol=0)
    _, _, _, counts = top2gating(logits, 3.0, 1)
    torch.testing.assert_close(counts[:2] / 2000, shares[:2] / shares[:2].sum(), atol=0.03, rtol=0)
    gate = TopKGate(3, 3, noisy_gate_policy="RSample").eval()
    assert torch.equal(gate(logits)[3], gate(logits)[3])
    x = torch.ones(5000)
    assert float((multiplicative_jitter(x, x.device) - 1).abs().max()) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"k": 3}, "k is 3, and the layer has 2 experts"), ({"noisy_gate_policy": "Noise"}, "'Jitter', 'RSample'")],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TopKGate(4, 2, **settings)
