"""``pipeline.stages``: which numbers there are and what forbids others, bytes before a launch, a real pipeline."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from ds_hf.autotune import tune
from ds_hf.autotune.command import Command
from ds_hf.autotune.cost import CostModel, Survey
from ds_hf.autotune.division import PIPE, SEQUENCE, TENSOR, MeshDivision, division_of, sizes_of
from ds_hf.autotune.footprint import Footprint
from ds_hf.autotune.options import Options
from ds_hf.autotune.space import STAGE, Space, freed_by, label_of
from ds_hf.config.load import examine
from ds_hf.memory import Predictor, Workload
from tests.autotune.scripts import PIPELINE
from tests.autotune.test_division import LENGTH, events
from tests.autotune.test_footprint import SHAPE
from tests.autotune.test_real import left_behind

BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}


def pipeline(processes: int = 4, pipe: int = 2, **facts: Any) -> dict[str, Any]:
    """What the first launch of a pipeline says: the embedding, two blocks, the norm and the head of a small Llama."""
    data = processes // pipe
    return events(processes, pipe=pipe, data=data, world_size=data, can_checkpoint=False, **facts)


@pytest.mark.parametrize(
    ("processes", "tree", "values", "why_not"),
    [
        (4, {}, (1, 2, 4), ""),
        (8, {}, (1, 2, 4), ""),  # 5 layers are no 8 stages
        (6, {}, (1, 2, 3), ""),
        (4, {"ds_hf": {"pipeline": {"chunks": 2}}}, (1, 2), ""),
        (4, {"ds_hf": {"pipeline": {"chunks": 4}}}, (1,), "5 layers cannot be divided over 2 stages x 4 chunks"),
    ],
)
def test_stages_that_processes_and_layers_allow(
    processes: int, tree: dict[str, Any], values: tuple[int, ...], why_not: str
) -> None:
    found = sizes_of(pipeline(processes), tree)
    assert found.values == {PIPE: values}
    assert why_not in found.why_not.get(PIPE, "")
    assert found.why_not[TENSOR] == found.why_not[SEQUENCE] == "the model is divided into stages"
    layers = sizes_of(pipeline(processes, model=None), tree)
    assert layers.values == {PIPE: (2,)}
    assert "not one that transformers builds" in layers.why_not[PIPE]


def space_of(tmp_path: Path, said: dict[str, Any], mappings: dict[str, str], **options: Any) -> Space:
    (tmp_path / "train.py").touch()
    words = [str(tmp_path / "train.py"), "--deepspeed_config", "ds.json"]
    tree = {**BATCH, "zero_optimization": {"stage": 1}}
    config = examine(tree, world=None, allow_auto=True)
    command, asked = Command.parse(words, mappings), Options(**options)
    sizes = sizes_of(said, config.resolved) if "pipe" in said["facts"] else None
    division = division_of(said["facts"])
    return Space(config, command, asked, cuda=False, can_checkpoint=False, division=division, sizes=sizes)


def test_settings_of_a_pipeline(tmp_path: Path) -> None:
    space = space_of(tmp_path, pipeline(), {PIPE: "--stages"}, tune=(STAGE,))
    assert space.own[PIPE] == 2  # the script has it
    found = {(setting[STAGE], setting[PIPE]) for setting in space.settings()}
    assert found == {(stage, 1) for stage in range(4)} | {(stage, pipe) for stage in range(3) for pipe in (2, 4)}
    assert label_of({STAGE: 1, PIPE: 4}) == "stage 1, pipeline of 4"
    assert space.division.of({PIPE: 4}) == MeshDivision(1, 1, 1, 4)


def test_the_script_has_to_follow(tmp_path: Path) -> None:
    kept = space_of(tmp_path, pipeline(), {}).kept[PIPE]
    assert "of a script that takes its stages from the file" in kept
    assert freed_by(PIPE, kept) == f"--tune {PIPE}"
    assert PIPE in space_of(tmp_path, pipeline(), {}, tune=(PIPE,)).own
    assert PIPE not in space_of(tmp_path, events(), {}).kept
    assert space_of(tmp_path, events(), {}, tune=(PIPE,)).kept[PIPE] == "the model is no PipelineModule"


def test_bytes_are_those_of_the_prediction() -> None:
    """Of the stage that takes most, at other numbers than the script's."""
    said = pipeline()
    footprint = Footprint(said["facts"], said["survey"], [(1, 8), (2, 4)])
    predictor = Predictor(
        LlamaConfig(**{**SHAPE, "num_key_value_heads": 2}), Workload(seq_len=LENGTH, attention="sdpa")
    )
    peaks = []
    for count in (1, 2, 4):
        tree = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": count}}
        settings = {**tree, "gradient_accumulation_steps": 2, "train_batch_size": "auto"}
        expected = predictor.predict(settings, world_size=4, micro_batch=2).device_peak
        peaks.append(footprint.predict(tree, 2, 4, checkpointing=False).device_peak)
        assert peaks[-1] == pytest.approx(expected, rel=0.01)
    assert peaks[0] > peaks[2]
    own = footprint.predict({"zero_optimization": {"stage": 1}}, 2, 4, checkpointing=False)  # as the script has it
    assert own.device_peak == peaks[1]


def test_stages_wait_for_each_other() -> None:
    """Of 8 micro-batches on 2 stages a ninth more is waiting, of 2 on 4 stages three halves."""
    said = pipeline()
    survey = Survey(said["facts"], {"bandwidth": 1e30}, {1: (0.9, 8, 0.0, 0)})
    model = CostModel({"zero_optimization": {"stage": 1}}, {PIPE: 2}, survey, None)
    work = 0.9 / (1 + 1 / 8) / 8 * 2  # of a micro-batch, on one process
    for pipe, steps in ((1, 4), (2, 8), (4, 2)):
        expected = steps * work / pipe * (1 + (pipe - 1) / steps)
        assert model.roofline({PIPE: pipe}, 1, steps) == pytest.approx(expected, rel=1e-6)


def script(tmp_path: Path, layers: int, *, follows: bool) -> list[str]:
    text = PIPELINE.replace("LAYERS", str(layers))
    (tmp_path / "train.py").write_text(text if follows else text.replace("num_stages=args.stages", "num_stages=2"))
    mappings = {"autotuning": {"arg_mappings": {PIPE: "--stages"}}}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    tree = {**batch, **mappings, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    return [str(tmp_path / "train.py"), "--deepspeed_config", str(tmp_path / "ds.json")]


def rows_of(tmp_path: Path) -> dict[str, dict[str, str]]:
    text = (tmp_path / "results" / "trials.csv").read_text()
    return {row[PIPE]: row for row in csv.DictReader(text.splitlines())}


@pytest.mark.slow
def test_a_pipeline_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"results_dir": tmp_path / "results", "budget": 900.0, "processes": 2, "confirm": False, "trials": 2}
    result = tune(script(tmp_path, 4, follows=True), **options)
    rows = rows_of(tmp_path)
    assert rows.keys() == {"1", "2"}
    for stages, row in rows.items():
        assert row["outcome"] == "ok", row
        assert int(row["micro"]) * int(row["accumulation"]) * 2 // int(stages) == 16
    if result.best[0].setting[PIPE] == 1:
        assert result.words[-2:] == ["--stages", "1"]
    assert result.config["pipeline"]["stages"] == result.best[0].setting[PIPE]
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_script_that_does_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"results_dir": tmp_path / "results", "budget": 900.0, "processes": 2, "confirm": False, "trials": 2}
    result = tune(script(tmp_path, 4, follows=False), **options)
    reason = "the script made 2 stages where 1 were asked for: it does not follow --stages"
    assert rows_of(tmp_path)["1"]["reason"] == reason
    assert result.best[0].own
