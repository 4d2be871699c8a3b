"""Losses between a student and a teacher against the formulas of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ds_hf.distillation import attention_loss, hidden_loss, logits_loss
from tests.helpers.live_bytes import LiveBytes

MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]])


def _pair(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).requires_grad_(), torch.randn(*shape, generator=generator) * 2


def _same(found: Tensor, expected: Tensor, of: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(each * 3, of, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ours.any()


@pytest.mark.parametrize("chunk", [1 << 30, 7 * 4 * 3, 1])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_by_torchs_kl_div(masked: bool, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_hf.distillation.losses._CHUNK_NBYTES", chunk)
    student, teacher = _pair(2, 5, 7)
    mask = MASK if masked else None
    each = F.kl_div(
        F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1), reduction="none",
        log_target=True,
    ).sum(-1)  # fmt: skip
    chosen = each[MASK.bool()] if masked else each
    _same(logits_loss(student, teacher, mask, temperature=temperature), chosen.mean() * temperature**2, student)
    total = logits_loss(student, teacher, mask, temperature=temperature, num_items=torch.tensor(9))
    _same(total, chosen.sum() * temperature**2 / 9, student)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_are_trls(beta: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = _pair(2, 5, 7)
    labels = torch.where(MASK.bool(), 3, -100)
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=1.0)
    _same(logits_loss(student, teacher, MASK, beta=beta), expected, student)


def test_probabilities_of_all_positions_never_exist() -> None:
    student, teacher = (each.detach().to(torch.bfloat16) for each in _pair(512, 4096))
    student.requires_grad_()
    whole = student.numel() * 4

    def peak() -> int:
        with LiveBytes() as live:
            logits_loss(student, teacher).backward()
        student.grad = None
        return live.peak

    with pytest.MonkeyPatch.context() as patch:
        unlimited = peak()
        patch.setattr("ds_hf.distillation.losses._CHUNK_NBYTES", whole // 32)
        assert peak() <= 2 * whole + whole // 8  # both logits and two gradients, all in bf16, and a chunk
    assert unlimited > 4 * whole


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_hidden_states(kind: str) -> None:
    student, teacher = _pair(2, 5, 6)
    found = hidden_loss(student, teacher, MASK, kind=kind)  # type: ignore[arg-type]
    ours, theirs = student[MASK.bool()], teacher[MASK.bool()]
    expected = F.mse_loss(ours, theirs) if kind == "mse" else 1 - F.cosine_similarity(ours, theirs, dim=-1).mean()
    _same(found, expected, student)
    assert hidden_loss(student, teacher, kind=kind, num_items=4).item() != found.item()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mse", "kl"])
@pytest.mark.parametrize("heads", [3, 6])
def test_attention_maps(kind: str, heads: int) -> None:
    scores = _pair(2, 3, 5, 5)[0]
    teacher = torch.randn(2, heads, 5, 5, generator=torch.Generator().manual_seed(4)).softmax(-1)
    student = scores.softmax(-1)
    found = attention_loss(student, teacher, MASK, kind=kind)  # type: ignore[arg-type]
    ours, theirs = (student, teacher) if heads == 3 else (student.mean(1, True), teacher.mean(1, True))
    each = (ours - theirs).square().sum(-1) if kind == "mse" else (theirs * (theirs / ours).log()).sum(-1)
    _same(found, each.mean(1)[MASK.bool()].mean(), scores)


def test_what_does_not_count_may_be_anything() -> None:
    student, teacher = _pair(2, 5, 6)
    broken = torch.where(MASK[..., None].bool(), teacher, torch.nan)
    assert hidden_loss(student, broken, MASK).item() == hidden_loss(student, teacher, MASK).item()
    nothing = torch.zeros_like(MASK)
    for loss in (logits_loss, hidden_loss):
        for items in (None, 0, torch.tensor(0)):
            found = loss(student, teacher, nothing, num_items=items)
            assert found.item() == 0
            assert not torch.autograd.grad(found, student)[0].any()


def test_what_does_not_fit_is_told() -> None:
    student, teacher = _pair(2, 5, 6)
    with pytest.raises(ValueError, match="the same tokens and the same vocabulary"):
        logits_loss(student, teacher[..., :4])
    with pytest.raises(ValueError, match="temperature 0 must be more than 0"):
        logits_loss(student, teacher, temperature=0)
    with pytest.raises(ValueError, match="beta 2 between 0 and 1"):
        logits_loss(student, teacher, beta=2)
    with pytest.raises(ValueError, match="project the student's"):
        hidden_loss(student, teacher[..., :4])
    with pytest.raises(ValueError, match="attention maps are"):
        attention_loss(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 4, 4))
