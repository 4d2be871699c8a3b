"""The batch keys under elasticity: filled in, contradicted, refused; and what is said about them."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config import ConfigError, load_config
from ds_hf.config.elastic_keys import elastic_notes
from ds_hf.config.elasticity import ElasticityConfigError, ElasticityIncompatibleWorldSize

SMALL = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 4, 6], "version": 0.1}


def faults(config: dict[str, Any], world: int = 2, kind: type[Exception] = ElasticityConfigError) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, world_size=world)
    assert isinstance(caught.value, kind)
    return str(caught.value)


def test_batch_keys_beside_it() -> None:
    filled = load_config({"elasticity": SMALL, "train_batch_size": 24, "gradient_accumulation_steps": 2}, world_size=2)
    assert filled.train_micro_batch_size_per_gpu == 6  # what was filled in before is no contradiction
    text = faults({"elasticity": SMALL, "train_batch_size": 8})
    assert "elasticity chooses the batch (24 = 6 x 2 x 2 processes), and train_batch_size is 8" in text
    ignored = load_config(
        {"elasticity": {**SMALL, "ignore_non_elastic_batch_info": True}, "train_batch_size": 8}, world_size=2
    )
    assert ignored.train_batch_size == 24
    assert [warning.message for warning in ignored.warnings] == [
        "no effect: elasticity chooses the batch (24 = 6 x 2 x 2 processes), and train_batch_size is 8"
    ]
    auto = load_config({"elasticity": SMALL, "train_batch_size": "auto"}, world_size=3, allow_auto=True)
    assert (auto.train_batch_size, auto.train_micro_batch_size_per_gpu) == (24, 4)


def test_sizes_that_do_not_fit() -> None:
    text = faults({"elasticity": SMALL}, 5, ElasticityIncompatibleWorldSize)
    assert "5 data-parallel processes do not make the global batch of 24 (given as world_size)" in text
    assert "train on 1, 2, 3, 4, 6, 12" in text
    other = load_config({"elasticity": {**SMALL, "version": 0.2}}, world_size=5)
    assert other.train_batch_size == 20
    assert "none of 1, 2, 3, 4, 6, 12, which make 24 samples a step: here it is 20" in other.warnings[0].message
    text = faults({"elasticity": {**SMALL, "version": 0.2}}, 64, ElasticityIncompatibleWorldSize)
    assert "64 processes with micro-batches of 2, 4, 6 make no global batch of at most 24" in text
    assert "no number of processes from 50 to 60" in faults({"elasticity": {**SMALL, "min_gpus": 50, "max_gpus": 60}})
    nodes = {**SMALL, "version": 0.2, "num_gpus_per_node": 8}
    assert "makes 48 samples a step, and the largest global batch is 24" in faults({"elasticity": nodes})
    assert "max_train_batch_size is missing" in faults({"elasticity": {"enabled": True, "micro_batch_sizes": [2]}})
    assert "not a choice here" in faults({"elasticity": {**SMALL, "version": 0.3}})


def test_model_parallel_meshes() -> None:
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    assert "scheme 0.1 of elasticity has no model-parallel" in faults({**tensor, "elasticity": SMALL}, 4)
    second = {**SMALL, "version": 0.2}
    assert "model_parallel_size is 1, and 2 processes hold" in faults({**tensor, "elasticity": second}, 4)
    nodes = {**second, "model_parallel_size": 2, "num_gpus_per_node": 2}
    filled = load_config({**tensor, "elasticity": nodes}, world_size=4)
    assert (filled.train_batch_size, filled.train_micro_batch_size_per_gpu) == (24, 6)  # on two replicas
    assert filled.gradient_accumulation_steps == 2


def test_who_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    off = load_config({"elasticity": {**SMALL, "enabled": False}, "train_batch_size": 8}, world_size=2)
    assert off.train_batch_size == 8
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given: dict[str, Any] = {"elasticity": SMALL, "train_batch_size": "auto"}
    assert load_config(given, allow_auto=True, check_batch=False).resolved["train_batch_size"] == "auto"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load_config(given, allow_auto=True, check_batch=False).resolved["train_batch_size"] == 24


def test_notes() -> None:
    notes = elastic_notes(load_config({"elasticity": SMALL}, world_size=3))
    assert notes[0] == "elasticity: 24 samples a step on 1, 2, 3, 4, 6, 12 data-parallel processes"
    assert "     3 processes: 2 micro-batches of 4 a step" in notes
    assert elastic_notes(load_config({"train_batch_size": 2}, world_size=2)) == []
