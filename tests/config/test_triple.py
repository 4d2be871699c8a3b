"""The batch triple: completion, contradictions, world size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ds_hf.config import ConfigError, load_config
from ds_hf.config.load import examine
from ds_hf.config.triple import KEYS, WorldSize
from ds_hf.errors import Fault

TOTAL, MICRO, STEPS = KEYS


def triple(world: int, **given: Any) -> tuple[Any, ...]:
    config = load_config(given, world_size=world)
    assert all(config.resolved[key] == getattr(config, key) for key in KEYS)
    return tuple(getattr(config, key) for key in KEYS)


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (2, {TOTAL: 16}, (16, 8, 1)),
        (2, {MICRO: 4}, (8, 4, 1)),
        (2, {TOTAL: 16, MICRO: 4}, (16, 4, 2)),
        (2, {TOTAL: 16, STEPS: 4}, (16, 2, 4)),
        (2, {MICRO: 4, STEPS: 3}, (24, 4, 3)),
        (2, {TOTAL: 24, MICRO: 4, STEPS: 3}, (24, 4, 3)),
        (3, {TOTAL: None, MICRO: 1}, (3, 1, 1)),
    ],
)
def test_missing_keys_follow(world: int, given: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert triple(world, **given) == expected


def attempt(world: int, given: dict[str, int]) -> tuple[tuple[int, ...] | None, tuple[Fault, ...]]:
    try:
        return triple(world, **given), ()
    except ConfigError as error:
        return None, error.faults


def test_every_small_case_is_consistent_or_refused_with_consistent_triples() -> None:
    values = (None, 1, 2, 3, 8)
    for total, micro, steps, world in itertools.product((None, 1, 2, 7, 12, 16), values, values, (1, 2, 3)):
        given = {key: value for key, value in zip(KEYS, (total, micro, steps), strict=True) if value is not None}
        found, faults = attempt(world, given)
        if found is None:
            assert len(faults) == 1
            fault = faults[0]
            if total is None:
                assert fault.fix.startswith('add "train_micro_batch_size_per_gpu"')
                continue
            assert f"world size {world}" in fault.message
            shown = [line.strip() for line in fault.fix.splitlines()[1:]]
            assert 1 <= len(shown) <= 4
            for line in shown:
                left, right = line.split(" = ")
                a, b, c = (int(part) for part in right.split(" x "))
                assert int(left) == a * b * c
                assert c == world
                assert a > 0
                assert b > 0
        else:
            assert found[0] == found[1] * found[2] * world
            assert all(value in (None, got) for value, got in zip((total, micro, steps), found, strict=True))


def test_the_error_says_what_where_from_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({TOTAL: 16, MICRO: 4, STEPS: 1}, world_size=2)
    text = str(caught.value)
    assert "train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x world size 2 = 8" in text
    assert "train_batch_size is 16 (world size 2: given as world_size)" in text
    lines = [line.strip() for line in text.splitlines()]
    assert lines[-3:] == ["16 = 4 x 2 x 2", "16 = 8 x 1 x 2", "8 = 4 x 1 x 2"]


def test_world_size_comes_from_the_argument_the_launcher_or_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert WorldSize.find(None) == WorldSize(4, "from the environment variable WORLD_SIZE")
    assert WorldSize.find(2).value == 2
    assert load_config({MICRO: 1}).train_batch_size == 4
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert WorldSize.find(None).value == 1
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="no launcher"):
        load_config({TOTAL: 3, MICRO: 2})


def test_world_size_of_a_running_group_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert WorldSize.find(None) == WorldSize(1, "from torch.distributed, which is initialised")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", True])
def test_an_impossible_world_size_is_refused(world_size: Any) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        load_config({MICRO: 1}, world_size=world_size)


def test_with_an_unknown_world_size_the_triple_has_to_be_possible() -> None:
    unknown = WorldSize(0, "unknown")
    config = examine({TOTAL: 16, MICRO: 4}, world=unknown, allow_auto=False)
    assert config.gradient_accumulation_steps is None
    with pytest.raises(ConfigError, match="no world size fits"):
        examine({TOTAL: 17, MICRO: 4}, world=unknown, allow_auto=False)
    with pytest.raises(ConfigError, match="neither"):
        examine({STEPS: 4}, world=unknown, allow_auto=False)
