"""Free keys: which, and which settings they span."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_hf.autotune.command import Command
from ds_hf.autotune.cost import LEAST_SPREAD, PRIOR_SPREAD, TRAVELS, CostModel, Survey
from ds_hf.autotune.division import HPZ, MICS, AxisSizes, MeshDivision
from ds_hf.autotune.options import Options
from ds_hf.autotune.space import (
    ACTIVATIONS,
    BUDGET,
    CAPTURE,
    CHECKPOINTING,
    CHUNKED_LOSS,
    COMPILE,
    FP8,
    QUANTIZED_GRADIENTS,
    QUANTIZED_WEIGHTS,
    STAGE,
    TILES,
    Space,
    label_of,
    told_up_front,
)
from ds_hf.config.load import examine


def space(folder: Path, file: dict[str, Any], options: Options | None = None, **facts: Any) -> Space:
    script = folder / "train.py"
    script.write_text("")
    command = Command.parse([str(script), "--deepspeed", "ds.json"])
    config = examine({"train_batch_size": 8, **file}, world=None, allow_auto=True)
    known: dict[str, Any] = {"cuda": True, "can_checkpoint": True, "can_chunk": True, **facts}
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


def test_a_preset_is_a_start_and_a_file_is_a_choice(tmp_path: Path) -> None:
    """What may change is said before anything is launched, with what frees the rest."""
    script = tmp_path / "train.py"
    script.write_text("")
    command = Command.parse([str(script), "--deepspeed", "zero2"])
    facts = {"cuda": False, "can_checkpoint": True}
    preset = Space(examine("zero2", world=None, allow_auto=True), command, Options(), **facts)
    assert preset.own[STAGE] == 2
    assert told_up_front(preset)[0] == f"may change: {STAGE}, {CHECKPOINTING}, the division of the global batch"
    assert told_up_front(preset)[-1].startswith("the values of a preset are where the search starts")
    asked = Options(tune=("expert_parallel.autoep_size",))  # whether there are experts is not known yet
    named = Space(examine("zero2", world=None, allow_auto=True), command, asked, **facts)
    assert "expert_parallel.autoep_size (where the model lets it)" in told_up_front(named)[0]
    file = space(tmp_path, {"zero_optimization": {"stage": 2}}, cuda=False)
    assert STAGE in file.kept
    kept = space(tmp_path, {}, Options(fix=("gradient_accumulation_steps", COMPILE, STAGE)), cuda=False)
    assert "the division" not in told_up_front(kept)[0]
    assert told_up_front(file)[1] == f"your file keeps: {STAGE} (--tune NAME frees one of them, --tune all each)"
    assert not any("own loader" in text for text in told_up_front(preset))
    loop = Command.parse([str(script), "--deepspeed_config", "ds.json"])
    given = examine({"train_batch_size": 8}, world=None, allow_auto=True)
    for fix, told in (((), True), (("train_micro_batch_size_per_gpu",), False)):
        said = told_up_front(Space(given, loop, Options(fix=fix), **facts))
        assert any("own loader has to take its micro-batches from the file" in text for text in said) == told


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


def test_fp8_is_tried_when_named(tmp_path: Path) -> None:
    file, fix = {"bf16": {"enabled": True}}, (CHECKPOINTING, COMPILE)
    assert not any(FP8 in setting for setting in space(tmp_path, file, Options(fix=fix)).settings())
    found = list(space(tmp_path, file, Options(fix=fix, tune=(FP8,))).settings())
    assert {setting[FP8] for setting in found} == {False, True}
    assert label_of({STAGE: 3, COMPILE: "blocks", FP8: True}) == "stage 3, compiled, in fp8"


GROUPS = {MICS: (-1, 2, 4), HPZ: (1, 2, 4)}


def test_groups_and_quantized_wires_are_tried_when_named(tmp_path: Path) -> None:
    kept = space(tmp_path, {}).kept
    wires = (QUANTIZED_WEIGHTS, QUANTIZED_GRADIENTS)
    assert all("free only when named" in kept[key] for key in (MICS, HPZ, *wires, BUDGET, TILES))
    options = Options(tune=(HPZ, MICS, *wires), fix=(COMPILE, CHECKPOINTING, ACTIVATIONS, CHUNKED_LOSS))
    found = list(space(tmp_path, {}, options, division=MeshDivision(8), sizes=AxisSizes(GROUPS, on_host=4)).settings())
    by_stage = {stage: [setting for setting in found if setting[STAGE] == stage] for stage in range(4)}
    assert {(s[MICS], s[HPZ], s[QUANTIZED_WEIGHTS]) for stage in range(3) for s in by_stage[stage]} == {(-1, 1, False)}
    assert {s[HPZ] for s in by_stage[3]} == {1, 2, 4}
    assert {s[MICS] for s in by_stage[3]} == {-1, 2, 4}
    assert not [s for s in found if s[MICS] > 1 and s[HPZ] > 1]  # one of them: the other has nothing left to divide
    assert {stage for stage in range(4) for s in by_stage[stage] if s[QUANTIZED_GRADIENTS]} <= {2, 3}


def test_a_budget_is_of_compiled_blocks(tmp_path: Path) -> None:
    options = Options(tune=(BUDGET, TILES), fix=(STAGE,))
    found = list(space(tmp_path, {}, options).settings())
    assert {setting[BUDGET] for setting in found if not setting[COMPILE] or setting[CHECKPOINTING]} == {None}
    assert {setting[BUDGET] for setting in found if setting[COMPILE]} == {None, 0.8, 0.5}
    assert {setting[TILES] for setting in found} == {False, "auto"}
