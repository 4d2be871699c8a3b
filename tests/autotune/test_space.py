"""Free keys: which, and which settings they span."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_hf.autotune.command import Command
from ds_hf.autotune.cost import LEAST_SPREAD, PRIOR_SPREAD, TRAVELS, CostModel, Survey
from ds_hf.autotune.options import Options
from ds_hf.autotune.space import ACTIVATIONS, CAPTURE, CHECKPOINTING, CHUNKED_LOSS, COMPILE, STAGE, Space, label_of
from ds_hf.config.load import examine


def space(folder: Path, file: dict[str, Any], options: Options | None = None, **facts: bool) -> Space:
    script = folder / "train.py"
    script.write_text("")
    command = Command.parse([str(script), "--deepspeed", "ds.json"])
    config = examine({"train_batch_size": 8, **file}, world=None, allow_auto=True)
    known = {"cuda": True, "can_checkpoint": True, "can_chunk": True, **facts}
    return Space(config, command, options or Options(), **known)


def test_activations_travel_only_where_blocks_are_checkpointed(tmp_path: Path) -> None:
    found = list(space(tmp_path, {}, Options(fix=(COMPILE,))).settings())
    assert {ACTIVATIONS, CHUNKED_LOSS, CHECKPOINTING} <= set(found[0])
    assert {setting[CHECKPOINTING] for setting in found if setting[ACTIVATIONS]} == {True}
    assert {setting[ACTIVATIONS] for setting in found if setting[CHECKPOINTING]} == {False, True}
    always = list(space(tmp_path, {}, Options(fix=(CHECKPOINTING,)), checkpoints=True).settings())
    assert {setting[ACTIVATIONS] for setting in always} == {False, True}


@pytest.mark.parametrize(
    ("file", "facts", "key", "reason"),
    [
        ({"activation_checkpointing": {"cpu_checkpointing": False}}, {}, ACTIVATIONS, "given in the file"),
        ({"ds_hf": {"offload_activations": True}}, {}, ACTIVATIONS, "given in the file"),
        ({}, {"can_checkpoint": False}, ACTIVATIONS, "the model checkpoints nothing"),
        ({}, {"cuda": False}, ACTIVATIONS, "has no effect without an accelerator"),
        ({}, {"can_chunk": False}, CHUNKED_LOSS, "only causal language models"),
        ({"ds_hf": {"chunked_loss": True}}, {}, CHUNKED_LOSS, "given in the file"),
    ],
)
def test_keys_that_are_kept(
    tmp_path: Path, file: dict[str, Any], facts: dict[str, bool], key: str, reason: str
) -> None:
    assert reason in space(tmp_path, file, **facts).kept[key]


def test_sequences_are_divided_as_the_script_does_it(tmp_path: Path) -> None:
    assert "sequence_parallel_size" not in space(tmp_path, {"sequence_parallel_size": 2}).own


def test_what_makes_room_costs_little() -> None:
    facts = {"total": 10**9, "trainable": 10**9, "largest_unit": 10**8, "module_dtype": "bfloat16", "world_size": 1}
    own = {STAGE: 2, CHECKPOINTING: True, ACTIVATIONS: False, CHUNKED_LOSS: False}
    model = CostModel({}, own, Survey(facts, {}, {1: (1.0, 1, 0.1, 10**9)}), None)
    plain = model.predict(own, 1, 1)
    moved, chunked = (model.predict({**own, key: True}, 1, 1) for key in (ACTIVATIONS, CHUNKED_LOSS))
    assert moved.seconds - plain.seconds == pytest.approx((TRAVELS - 1) * 0.9)
    assert chunked.seconds == plain.seconds
    assert LEAST_SPREAD <= chunked.spread < PRIOR_SPREAD / 2


def test_words_for_them() -> None:
    assert label_of({STAGE: 2, CHECKPOINTING: True, ACTIVATIONS: True, CHUNKED_LOSS: True}) == (
        "stage 2, checkpointing, activations on host, loss in chunks"
    )


def test_captured_blocks_are_tried_when_named(tmp_path: Path) -> None:
    fix = (CHECKPOINTING, COMPILE)
    assert not any(CAPTURE in setting for setting in space(tmp_path, {}, Options(fix=fix)).settings())
    found = list(space(tmp_path, {}, Options(fix=fix, tune=(CAPTURE,))).settings())
    assert {setting[CAPTURE] for setting in found} == {False, "blocks"}
    assert label_of({STAGE: 2, CAPTURE: "blocks"}) == "stage 2, captured"
