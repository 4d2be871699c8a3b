"""What is said about models that every process holds whole."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.builder import whole_model_advice


def parameter(nbytes: int) -> torch.Tensor:
    """A parameter that counts as ``nbytes`` and has four."""
    return torch.empty(1).expand(nbytes // 4)


def test_advice_has_the_cost_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    advice = whole_model_advice([parameter(10 << 30), parameter(4 << 30)], 16)
    assert advice is not None
    assert "14.0 GiB" in advice
    assert "8 processes on this host: 112.0 GiB" in advice
    assert "a shard is 0.9 GiB" in advice
    assert "TrainingArguments before from_pretrained()" in advice


def test_no_advice_where_the_cost_is_small_or_has_to_be() -> None:
    assert whole_model_advice([parameter(1 << 20)], 8) is None
    assert whole_model_advice([parameter(10 << 30)], 1) is None
