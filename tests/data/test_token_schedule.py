"""How many tokens are kept, against what DeepSpeed 0.19.8 gives (``layer_tokens.json``, numbers alone)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hf.data.token_schedule import RandomLTDScheduler, token_faults
from ds_hf.errors import ConfigError

TABLE = json.loads((Path(__file__).parent / "layer_tokens.json").read_text())
SCHEDULE = {
    "min_value": 16,
    "max_value": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 10, "seq_per_step": 8},
}


@pytest.mark.parametrize("case", TABLE["cases"])
def test_each_step_keeps_what_it_does_in_deepspeed(case: dict[str, Any]) -> None:
    scheduler = RandomLTDScheduler(case["config"])
    assert [scheduler.get_value(step) for step in TABLE["steps"]] == case["values"]
    found = []
    for step in TABLE["steps"]:
        scheduler.update_seq(step)
        scheduler.update_seq(step)
        found.append([scheduler.get_current_seq(), scheduler.state["consumed_layer_tokens"]])
    assert found == case["updated"]
    assert sorted(scheduler.state_dict()) == case["keys"]
    again = RandomLTDScheduler(case["config"])
    again.load_state_dict(scheduler.state_dict())
    assert again.get_state() == scheduler.get_state()
    again.reset_to_init()
    assert again.get_total_layer_tokens(120) == case["total"]


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"schedule_type": None}, "/schedule_type", "is missing"),
        ({"schedule_type": "fixed_root"}, "/schedule_type", "no schedule 'fixed_root'"),
        ({"min_value": None}, "/min_value", "min_value is missing"),
        ({"min_value": 65}, "/min_value", "begins at 65 tokens, and ends at 64"),
        ({"schedule_config": {"seq_per_step": 8}}, "/schedule_config/require_steps", "require_steps is missing"),
        (
            {"schedule_config": {"require_steps": 10, "seq_per_step": 32}},
            "/schedule_config/seq_per_step",
            "no token would be kept",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(changes: dict[str, Any], place: str, words: str) -> None:
    (fault,) = token_faults({**SCHEDULE, **changes})
    assert fault.pointer == place
    assert words in fault.message


def test_a_rate_by_layer_tokens_is_refused() -> None:
    config = {"total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_schedule": SCHEDULE, "global_batch_size": 1}
    with pytest.raises(ConfigError, match="does not exist"):
        RandomLTDScheduler({**config, "layer_token_lr_schedule": {"enabled": True}})
