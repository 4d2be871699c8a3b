"""Sections of data efficiency: what is refused, what is warned of, and what ``explain`` says."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config.data_efficiency import data_notes
from ds_hf.config.load import load_config
from ds_hf.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}
LINEAR = {
    "min_difficulty": 64,
    "max_difficulty": 256,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}


def curricula(metrics: dict[str, Any], **more: Any) -> dict[str, Any]:
    section = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": section, **more}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


def legacy(**changes: Any) -> dict[str, Any]:
    return {"curriculum_learning": {"enabled": True, **LINEAR, **changes}}


def load(tree: dict[str, Any]) -> Any:
    return load_config({**BATCH, **tree}, world_size=2)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (legacy(curriculum_type="vocabulary"), "'vocabulary' is no curriculum of this section"),
        (legacy(schedule_config={"difficulty_step": 8}), "fixed_linear needs total_curriculum_step"),
        (legacy(min_difficulty="short"), "min_difficulty"),
        ({**legacy(), **curricula({"seqlen": LINEAR})}, "data_efficiency has a curriculum of lengths as well"),
        (curricula({}), "needs a metric of difficulty"),
        (curricula({"seqlen": {**LINEAR, "max_difficulty": 8}}), "begins at 64, and its largest is 8"),
        (curricula({"seqlen": LINEAR, "seqlen_truncate": LINEAR}), "are the same"),
        ({**legacy(), "sequence_parallel_size": 2}, "divided among processes before"),
    ],
)
def test_what_cannot_be_is_said_before_training(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(tree)
    assert all(fault.fix for fault in caught.value.faults)


def test_what_is_enabled_inside_of_what_is_not_has_no_effect_and_says_so() -> None:
    tree = curricula({"seqlen": LINEAR})
    tree["data_efficiency"]["enabled"] = False
    config = load(tree)
    assert config.data_efficiency.length_curriculum is None
    assert [w.message for w in config.warnings] == [
        "no effect: data_efficiency is not enabled (DeepSpeed reads this switch alone)"
    ]


def test_explain_shows_lengths_over_steps() -> None:
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}
    tree = {**legacy(), "scheduler": decay}
    lengths, share, rate = data_notes(load(tree))
    assert lengths.startswith("curriculum of lengths, positions at most: 64 (step 1), 80 (step 12), ")
    assert lengths.endswith("256 (step 100)")
    assert share == "its 100 steps have 61% of the tokens that they have at 256 positions"
    assert rate.startswith("WarmupDecayLR counts steps, and not tokens")
    discrete = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [64, 256], "max_step": [10]}}
    assert data_notes(load(curricula({"seqlen": {**LINEAR, **discrete}})))[0].endswith("64 (step 1), 256 (step 11)")
    assert data_notes(load({})) == []
    assert "by a function" in data_notes(load(legacy(schedule_type="custom")))[0]
