"""Elasticity: DeepSpeed's numbers, the batch keys that follow, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ds_hf.config import elasticity as elastic
from ds_hf.config import load_config
from ds_hf.config.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    ensure_immutable_elastic_config,
)

# What DeepSpeed 0.19.6 answers: largest batch, micro-batches, version, other keys, processes; samples a step,
# micro-batch, how many sizes, the first and the last of them.
ORACLE: list[tuple[Any, ...]] = [
    (100, [16, 18], 0.1, {}, 6, 96, 16, 4, 1, 6),
    (100, [16, 3, 6, 15], 0.2, {}, 5, 90, 6, 1, 5, 5),
    (333, [1, 5, 14], 0.2, {"min_gpus": 8, "max_gpus": 16, "num_gpus_per_node": 8}, 1, 333, 1, 1, 1, 1),
    (100, [13, 19, 18, 4], 0.2, {"max_gpus": 16, "num_gpus_per_node": 2}, 6, 96, 4, 5, 2, 12),
    (333, [1], 0.1, {"min_gpus": 2}, 2, 240, 1, 19, 2, 240),
    (100, [5, 9, 12, 17], 0.1, {"min_gpus": 4}, 12, 60, 5, 4, 4, 12),
    (1000, [8, 13], 0.1, {"max_gpus": 64, "prefer_larger_batch": False}, 1, 960, 8, 15, 1, 60),
    (1000, [16, 9, 7], 0.1, {"max_gpus": 200}, 6, 840, 7, 16, 1, 120),
    (100, [4, 8], 0.1, {"min_gpus": 2}, 24, 96, 4, 7, 2, 24),
    (4096, [12, 3, 4, 13], 0.1, {"max_gpus": 16}, 6, 3360, 4, 13, 1, 16),
    (100, [2, 12], 0.2, {}, 16, 96, 2, 10, 1, 48),
    (1000, [17, 19, 7], 0.2, {"min_gpus": 8}, 16, 912, 19, 1, 16, 16),
    (64, [12, 5], 0.1, {"prefer_larger_batch": False}, 2, 60, 5, 7, 1, 12),
    (333, [6, 8, 19, 14], 0.2, {"prefer_larger_batch": False, "num_gpus_per_node": 4}, 1, 322, 14, 1, 1, 1),
    (333, [15, 1, 13, 11], 0.2, {"prefer_larger_batch": False}, 4, 240, 15, 20, 1, 240),
    (333, [18, 17], 0.2, {"max_gpus": 64, "prefer_larger_batch": False}, 8, 272, 17, 1, 8, 8),
    (1000, [15, 4], 0.2, {}, 8, 960, 15, 22, 1, 240),
    (1000, [3], 0.1, {"max_gpus": 16, "prefer_larger_batch": False}, 8, 720, 3, 11, 1, 16),
    (100, [10, 2], 0.2, {"min_gpus": 4, "prefer_larger_batch": False}, 16, 96, 2, 7, 4, 48),
    (32, [2, 10], 0.2, {"min_gpus": 2, "max_gpus": 16, "num_gpus_per_node": 2}, 4, 24, 2, 4, 2, 12),
    (4096, [9], 0.1, {"min_gpus": 4, "prefer_larger_batch": False}, 5, 3240, 9, 21, 4, 360),
    (4096, [3, 17], 0.2, {}, 8, 4080, 17, 1, 8, 8),
    (4096, [5, 10, 19, 2], 0.2, {}, 16, 3360, 10, 44, 1, 1680),
    (4096, [19], 0.1, {}, 4, 3420, 19, 18, 1, 180),
    (32, [2], 0.1, {"prefer_larger_batch": False}, 12, 24, 2, 6, 1, 12),
    (1000, [18], 0.1, {"min_gpus": 4, "max_gpus": 16}, 16, 864, 18, 5, 4, 16),
]  # fmt: skip


@pytest.mark.parametrize("row", ORACLE)
def test_deepspeeds_numbers(row: tuple[Any, ...]) -> None:
    most, micros, version, others, world, total, micro, count, first, last = row
    section = {"max_train_batch_size": most, "micro_batch_sizes": micros, "version": version, **others}
    config = {"elasticity": {"enabled": True, **section}}
    found = compute_elastic_config(config, "0.19.6", world_size=world)
    assert (found[0], found[2], len(found[1]), found[1][0], found[1][-1]) == (total, micro, count, first, last)
    filled = load_config(config, world_size=world)
    steps = total // (micro * world)
    assert (filled.train_batch_size, filled.train_micro_batch_size_per_gpu) == (total, micro)
    assert filled.gradient_accumulation_steps == steps
    assert micro * steps * world == total


SECTION = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "version": 0.1,
}


def compute(world: int = 0, target: str = "0.19.8", more: bool = False, **changes: Any) -> Any:
    section = {key: value for key, value in {**SECTION, **changes}.items() if value is not None}
    return compute_elastic_config({"elasticity": section}, target, world_size=world, return_microbatch=more)


def test_what_schedulers_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    total, sizes = compute()
    assert (total, len(sizes)) == (9792, 23)
    for size in sizes:
        assert any(total // size % micro == 0 for micro in (8, 12, 16, 17))
    assert compute(64) == (total, sizes, 17)
    with pytest.raises(
        ElasticityIncompatibleWorldSize, match=r"128 data-parallel processes do not make .* 9792; these"
    ):
        compute(128)
    with pytest.raises(ElasticityConfigError, match="needs the number of processes"):
        compute(more=True)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute(more=True) == (total, sizes, 17)
    monkeypatch.setenv("WORLD_SIZE", "128")
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute(more=True)


@pytest.mark.parametrize(
    ("together", "micros", "micro"), [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8), (4, [8], 8)]
)
def test_processes_that_hold_a_model_together(
    together: int, micros: list[int], micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    section = {"max_train_batch_size": 64, "micro_batch_sizes": micros, "min_gpus": 16, "max_gpus": 16}
    nodes = {"version": 0.2, "model_parallel_size": together, "num_gpus_per_node": 8}
    total, sizes, found = compute(more=True, **section, **nodes)
    assert (total, found) == (64, micro)
    assert 16 // together in sizes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"enabled": False}, "elasticity is off"),
        ({"max_train_batch_size": None}, "max_train_batch_size is missing"),
        ({"micro_batch_sizes": None}, "micro_batch_sizes is missing"),
        ({"micro_batch_sizes": 5}, "has to be a list"),
        ({"micro_batch_sizes": []}, "has to be a list"),
        ({"micro_batch_sizes": [2, 0.5, 4]}, "0.5: each is a whole number"),
        ({"micro_batch_sizes": [1, -1]}, "-1: each is a whole number"),
        ({"micro_batch_sizes": ["a", None]}, "'a': each is a whole number"),
        ({"max_train_batch_size": 16}, "micro-batch sizes 17 are more than the largest global batch, 16"),
        ({"min_gpus": -1}, "min_gpus is -1"),
        ({"max_gpus": -1}, "max_gpus is -1"),
        ({"max_gpus": 8}, "min_gpus 32 is more than max_gpus 8"),
        ({"min_time": -1}, "min_time is -1"),
        ({"version": "0.3"}, "elasticity.version is 0.3"),
        ({"model_parallel_size": 4}, "scheme 0.1 of elasticity has no model-parallel"),
        ({"model_parallel_size": 3, "version": 0.2, "num_gpus_per_node": 8}, "3 processes hold a model together"),
    ],
)
def test_wrong_sections(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ElasticityError, match=sentence):
        compute(16 if changes.get("version") == 0.2 else 0, **changes)


def test_what_is_no_section() -> None:
    with pytest.raises(ElasticityConfigError, match='no section "elasticity"'):
        compute_elastic_config({}, "0.19.8")
    with pytest.raises(ValueError, match="list and has to be a dict"):
        compute_elastic_config([], "0.19.8")  # type: ignore[arg-type]
    with pytest.raises(ElasticityError, match=r"DeepSpeed 0\.2 is older than"):
        compute(target="0.2")
    assert compute(target="0.19.8+ds.hf")[0] == 9792


def test_the_schedulers_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(elastic.SCHEDULED, raising=False)
    ensure_immutable_elastic_config(SECTION)
    monkeypatch.setenv(elastic.SCHEDULED, json.dumps(SECTION))
    ensure_immutable_elastic_config(SECTION)
    with pytest.raises(
        ElasticityConfigError, match=r"max_train_batch_size is 20 in .* and was 10000 for the scheduler"
    ):
        ensure_immutable_elastic_config({**SECTION, "max_train_batch_size": 20})
    small = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}
    with pytest.raises(ElasticityConfigError, match="was 10000 for the scheduler"):
        load_config({"elasticity": small}, world_size=2)
    monkeypatch.setenv(elastic.SCHEDULED, "[]")
    with pytest.raises(ElasticityConfigError, match="does not hold an elasticity section"):
        ensure_immutable_elastic_config(SECTION)


def test_highly_composite_numbers() -> None:
    """Each has more divisors than any smaller number of the list, and what scales a batch is the largest that fits."""
    divisors = [sum(number % d == 0 for d in range(1, number + 1)) for number in elastic.HIGHLY_COMPOSITE[:17]]
    assert divisors == sorted(set(divisors))
    for most in (*range(1, 400, 7), 10**6):
        for base in (1, 3, 8):
            expected = [base * max(n for n in elastic.HIGHLY_COMPOSITE if n * base <= most)] if base <= most else []
            assert elastic.scaled_batches([base], most) == expected


def test_sizes_of_a_batch() -> None:
    for batch, micros in ((24, (2, 4, 6)), (30, (4, 7)), (36, (1, 5)), (720, (8, 9, 16))):
        plain = [n for n in range(1, batch + 1) if any(batch % (n * micro) == 0 for micro in micros)]
        assert elastic.sizes_of(batch, micros, 1, batch) == plain
        assert elastic.sizes_of(batch, micros, 3, 9) == [n for n in plain if 3 <= n <= 9]
    assert math.lcm(2, 4, 6) in elastic.scaled_batches([12], 12)
