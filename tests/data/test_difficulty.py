"""Schedules against what DeepSpeed 0.19.8 gives (``curricula.json``, numbers alone)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed.runtime.data_pipeline.curriculum_scheduler as theirs
import numpy as np
import pytest

from ds_hf.data.difficulty import CurriculumScheduler, schedule_faults
from ds_hf.errors import ConfigError

TABLE = json.loads((Path(__file__).parent / "curricula.json").read_text())
ROOT = {"total_curriculum_step": 100, "difficulty_step": 8, "root_degree": 2}


def section(**changes: Any) -> dict[str, Any]:
    found = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_root", "schedule_config": dict(ROOT)}
    return {**found, **changes}


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: case["config"]["schedule_type"])
def test_each_step_has_the_difficulty_of_deepspeed(case: dict[str, Any]) -> None:
    scheduler = CurriculumScheduler(case["config"])
    assert [scheduler.get_difficulty(step) for step in TABLE["steps"]] == case["difficulty"]
    assert [scheduler.update_difficulty(step) for step in TABLE["steps"]] == case["updated"]


def test_a_function_gives_the_difficulty_and_the_largest_is_kept() -> None:
    scheduler = theirs.CurriculumScheduler(section(schedule_type="custom"))
    with pytest.raises(ConfigError, match="set_custom_curriculum_learning_schedule"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: {1: 8, 2: 64}.get(step, 16))
    assert [scheduler.update_difficulty(step) for step in (1, 2, 3)] == [8, 64, 64]
    scheduler = theirs.CurriculumScheduler(section(schedule_type="custom"))
    scheduler.set_custom_get_difficulty(lambda step: np.int64(8 + step))
    assert scheduler.update_difficulty(1) == 9
    assert type(scheduler.get_current_difficulty()) is int  # which a checkpoint holds
    scheduler.set_current_difficulty(64)
    other = CurriculumScheduler(section())
    other.set_current_difficulty(scheduler.get_current_difficulty())
    assert other.update_difficulty(1) == 64


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"min_difficulty": None}, "/min_difficulty", "needs min_difficulty"),
        ({"min_difficulty": 100}, "/min_difficulty", "begins at 100, and its largest is 64"),
        ({"min_difficulty": 0}, "/min_difficulty", "not a number above 0"),
        ({"schedule_type": "cosine"}, "/schedule_type", "no schedule 'cosine'"),
        ({"schedule_config": None}, "/schedule_config", "needs a schedule_config"),
        ({"schedule_config": {"difficulty_step": 8}}, "/schedule_config", "total_curriculum_step and root_degree"),
        ({"schedule_config": {**ROOT, "difficulty_step": 0}}, "/schedule_config/difficulty_step", "above 0"),
        ({"schedule_config": {**ROOT, "difficulty_step": 128}}, "/schedule_config/difficulty_step", "no multiple"),
        ({"schedule_config": {**ROOT, "root_degree": "2"}}, "/schedule_config/root_degree", "not a number"),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16], "max_step": [4, 8]}},
            "/schedule_config/max_step",
            "2 difficulties and 2 steps",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16, 32], "max_step": [8, 4]}},
            "/schedule_config/max_step",
            "do not rise",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16], "max_step": [-4]}},
            "/schedule_config/max_step",
            "do not rise from 1 on",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 128], "max_step": [8]}},
            "/schedule_config/difficulty",
            "above max_difficulty",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": 8, "max_step": [8]}},
            "/schedule_config/difficulty",
            "not a list",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(changes: dict[str, Any], place: str, words: str) -> None:
    (fault,) = schedule_faults(section(**changes))
    assert fault.pointer == place
    assert words in fault.message
    assert fault.fix
    with pytest.raises(ConfigError, match="curriculum"):
        CurriculumScheduler(section(**changes))
