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


FILES = {"index_to_sample_path": "a", "index_to_metric_path": "b"}


def budget(**changes: Any) -> dict[str, Any]:
    sampling = {"enabled": True, "dynamic_batching": {"enabled": True, **changes}}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


def dropping(**changes: Any) -> dict[str, Any]:
    schedule = {"min_value": 16, "max_value": 64, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 100, "seq_per_step": 8}
    section = {"total_layer_num": 4, "random_ltd_layer_id": [1, 2], "random_ltd_schedule": schedule}
    inner = {"enabled": True, **section, **changes}
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": inner}}}


def load(tree: dict[str, Any]) -> Any:
    return load_config({**BATCH, **tree}, world_size=2)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (legacy(curriculum_type="vocabulary"), "this section has no curriculum 'vocabulary'"),
        (legacy(schedule_config={"difficulty_step": 8}), "fixed_linear needs total_curriculum_step"),
        (legacy(min_difficulty="short"), "min_difficulty"),
        ({**legacy(), **curricula({"seqlen": LINEAR})}, "data_efficiency has a curriculum of lengths as well"),
        (curricula({}), "needs a metric of difficulty"),
        (curricula({"seqlen": {**LINEAR, "max_difficulty": 8}}), "begins at 64, and its largest is 8"),
        (curricula({"seqlen": LINEAR, "seqlen_truncate": LINEAR}), "are the same"),
        (curricula({"rare": LINEAR}), "chooses no samples, and is no length"),
        (curricula({"rare": {**LINEAR, "clustering_type": "schedule_based"}}), "no file gives these values"),
        (curricula({"rare": {**LINEAR, "index_to_sample_path": "a"}}), "index_to_metric_path has them"),
        (budget(), "max_tokens is missing"),
        (budget(max_tokens=8, min_batch_size=4, max_batch_size=2), "is below min_batch_size 4"),
        (curricula({"a": {**LINEAR, **FILES}}, dynamic_batching={"enabled": True, "max_tokens": 8}), "metrics choose"),
        (dropping(random_ltd_layer_id=[]), "no block is named"),
        (dropping(random_ltd_layer_id=[1, 1]), "a block is named twice"),
        (dropping(random_ltd_layer_id=[1, 4]), "there is no block 4 among 4"),
        (dropping(random_ltd_layer_num=3), "random_ltd_layer_num is 3, and random_ltd_layer_id names 2"),
        (dropping(model_type="both"), "decoder or encoder"),
        (dropping(hidden_state_order="dim"), "batch_seq_dim or seq_batch_dim"),
        (dropping(layer_token_lr_schedule={"enabled": True}), "does not exist"),
        (dropping(random_ltd_schedule={}), "schedule_type is missing"),
        ({**dropping(), "sequence_parallel_size": 2}, "sequences are divided among processes"),
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


def test_explain_shows_tokens_over_steps() -> None:
    kept, share = data_notes(load(dropping()))
    assert kept.startswith("random_ltd, tokens kept in 2 blocks: 16 (step 1), 16 (step 13), 24 (step 26), ")
    assert kept.endswith("64 (step 101)")
    assert share == "its 100 steps have 78% of the layer-tokens that they have without"


def test_explain_shows_difficulties_of_metrics_and_theta_over_steps() -> None:
    rare = {**LINEAR, **FILES}
    shares = {**rare, "difficulty_type": "percentile", "min_difficulty": 10, "max_difficulty": 100}
    own = {**rare, "schedule_type": "custom"}
    first, second, third = data_notes(load(curricula({"rare": rare, "loss": shares, "own": own})))
    assert first.startswith("difficulty of rare, at most: 64 (step 1), ")
    assert first.endswith("256 (step 100)")
    assert second.startswith("loss, shares of 100 of the samples, at most: ")
    assert second.endswith("96 (step 100)")  # the largest multiple of difficulty_step
    assert third.startswith("difficulty of own: by a function")
    (theta,) = data_notes(load({"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.01}}))
    assert theta.endswith(
        "computed): 1.00 (step 1), 0.68 (step 101), 0.57 (step 201), 0.52 (step 301), 0.51 (step 401)"
    )
