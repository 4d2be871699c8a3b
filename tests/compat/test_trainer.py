"""An unmodified Trainer script under torchrun: every logged number equals those of the Trainer without DeepSpeed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.compat.common import (
    AUTO_BATCH,
    PLAIN,
    SCRIPTS,
    WORLD,
    ScriptFailure,
    largest_difference,
    read_json,
    run_python,
    steps,
    write_json,
)
from tests.helpers.distributed import run_torchrun
from tests.helpers.interpreter import torchrun

SCRIPT = SCRIPTS / "trainer_script.py"
TOLERANCE = 5e-5 if torch.cuda.is_available() else 1e-5  # of losses near 5; sums on a GPU have no fixed order
MAX_STEPS, SAVE_STEPS = 8, 4
# 60 samples, 4 a rank and step: on two ranks the last accumulation of the epoch is shorter. The best checkpoint is made
# the *first* one (highest loss wins), so that load_best_model_at_end has something to undo.
ARGUMENTS = (
    "--per_device_train_batch_size=2 --gradient_accumulation_steps=2 --learning_rate=5e-3 --warmup_steps=2 "
    f"--max_steps={MAX_STEPS} --max_grad_norm=0.5 --seed=3 --logging_steps=1 --disable_tqdm=True --report_to=none "
    f"--eval_strategy=steps --eval_steps={SAVE_STEPS} --save_strategy=steps --save_steps={SAVE_STEPS} "
    "--load_best_model_at_end=True --metric_for_best_model=loss --greater_is_better=True"
).split()


@dataclass(frozen=True)
class Run:
    """One finished run of the script."""

    output: Path
    report: dict[str, Any]
    printed: str

    def weights(self) -> dict[str, torch.Tensor]:
        """What ``save_model`` wrote, as from_pretrained loads it."""
        model = AutoModelForCausalLM.from_pretrained(self.output)
        return {name: value.detach() for name, value in model.state_dict().items()}


def run(model: Path, folder: Path, *more: str, world_size: int = WORLD, real: bool = False) -> Run:
    """Run the script; with ``world_size`` 0 without any launcher, with ``real`` under torchrun itself."""
    output, report = folder / "out", folder / "report.json"
    arguments = [f"--model_name_or_path={model}", f"--output_dir={output}", f"--report={report}", *ARGUMENTS, *more]
    if real:
        printed = run_torchrun(SCRIPT, *arguments, world_size=world_size, timeout=100)
    elif world_size:
        printed = torchrun(SCRIPT, *arguments, world_size=world_size)
    else:
        printed = run_python(SCRIPT, *arguments)
    return Run(output, read_json(report), printed)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same script without DeepSpeed: DistributedDataParallel."""
    return run(tiny_model, tmp_path_factory.mktemp("reference"), *PLAIN)


class Runs:
    """Runs at each stage, each done once, when a test first asks for it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.done: dict[int, Run] = {}

    def config(self, stage: int) -> Path:
        """The configuration file of a stage."""
        return write_json(self.folder / f"stage{stage}.json", {**AUTO_BATCH, "zero_optimization": zero_section(stage)})

    def __getitem__(self, stage: int) -> Run:
        if stage not in self.done:
            folder = self.folder / f"stage{stage}"
            folder.mkdir()
            # test_accelerate.py starts real processes at stage 3
            self.done[stage] = run(self.model, folder, f"--deepspeed={self.config(stage)}", real=stage != 3)
        return self.done[stage]


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_model, tmp_path_factory.mktemp("stages"))


def zero_section(stage: int) -> dict[str, Any]:
    """The ZeRO section of a stage; stage 3 gathers its weights to save them."""
    return {"stage": stage, **({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {})}


SLOW = pytest.mark.slow
STAGES = pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=SLOW) for stage in (0, 1, 2)), 3])


@pytest.mark.feature("Trainer", "every logged number as without DeepSpeed", pain="P30")
@STAGES
def test_every_logged_number_equals_the_trainer_without_deepspeed(runs: Runs, stage: int, reference: Run) -> None:
    ours, theirs = steps(runs[stage].report), steps(reference.report)
    assert len([row for row in ours if "grad_norm" in row]) == MAX_STEPS
    assert largest_difference(ours, theirs) <= TOLERANCE
    assert runs[stage].report["world_size"] == WORLD


@pytest.mark.feature("Trainer", "`load_best_model_at_end`", pain="P20")
@STAGES
def test_best_model_is_loaded_at_the_end(runs: Runs, stage: int) -> None:
    report = runs[stage].report
    assert Path(report["best"]).name == f"checkpoint-{SAVE_STEPS}"
    at_best, at_end = (row["eval_loss"] for row in steps(report)[:-1] if "eval_loss" in row)
    assert report["final"]["eval_loss"] == at_best != at_end


@pytest.mark.feature("Trainer", "`save_model`, then `from_pretrained`", pain="P19")
@STAGES
def test_saved_model_loads_and_has_the_reference_weights(runs: Runs, stage: int, reference: Run) -> None:
    ours, theirs = runs[stage].weights(), reference.weights()
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= TOLERANCE


@pytest.mark.feature("Trainer", "resumes exactly", pain="P22")
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3]
)
def test_resumed_run_continues_exactly(runs: Runs, stage: int, tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = runs[stage].output / f"checkpoint-{SAVE_STEPS}"
    more = (f"--deepspeed={runs.config(stage)}", f"--resume_from_checkpoint={checkpoint}")
    assert steps(run(tiny_model, tmp_path, *more).report) == steps(runs[stage].report)


@pytest.mark.slow
@pytest.mark.feature("Trainer", "optimizer named in the JSON file")
def test_optimizer_of_the_json_file(reference: Run, tiny_model: Path, tmp_path: Path) -> None:
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    content = {**AUTO_BATCH, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}}
    run_ = run(tiny_model, tmp_path, f"--deepspeed={write_json(tmp_path / 'ds.json', content)}")
    ours, theirs = steps(run_.report), steps(reference.report)
    # The engine steps this schedule itself, before the Trainer logs: the rate shown is the next step's.
    our_rates, their_rates = ([row.pop("learning_rate") for row in rows if "loss" in row] for rows in (ours, theirs))
    assert largest_difference(ours, theirs) <= TOLERANCE
    assert our_rates[:-1] == their_rates[1:]


@pytest.mark.slow
@pytest.mark.feature("Trainer", "one process without launcher, `--deepspeed zero2`")
def test_one_process_without_launcher_takes_a_preset(tiny_model: Path, reference: Run, tmp_path: Path) -> None:
    more = (
        "--deepspeed=zero3",
        "--gradient_accumulation_steps=4",
        "--save_strategy=no",
        "--load_best_model_at_end=False",
    )
    ours = run(tiny_model, tmp_path, *more, world_size=0)
    first = steps(reference.report)[0]
    assert ours.report["world_size"] == 1
    assert steps(ours.report)[0]["step"] == 1
    assert steps(ours.report)[0]["learning_rate"] == first["learning_rate"]
    assert steps(ours.report)[-1]["eval_loss"] < steps(ours.report)[0]["loss"]


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`--deepspeed auto`")
def test_auto_chooses_prints_and_trains(tiny_model: Path, reference: Run, tmp_path: Path) -> None:
    ours = run(tiny_model, tmp_path, "--deepspeed=auto")
    assert ours.printed.count("--deepspeed auto takes zero0: the smallest that fits") == 1
    processes = f"{WORLD} process{'es' if WORLD > 1 else ''}"
    assert f"0.0 M parameters (0.0 M trainable), float32, {processes}" in ours.printed
    assert largest_difference(steps(ours.report), steps(reference.report)) <= TOLERANCE


def test_a_wrong_config_stops_before_the_model_is_touched(tmp_path: Path) -> None:
    config = write_json(tmp_path / "ds.json", {**AUTO_BATCH, "zero_optimization": {"stge": 2, "overlap_comm": "yes"}})
    arguments = ["--model_name_or_path=/does/not/exist", f"--report={tmp_path}/r", f"--output_dir={tmp_path}/o"]
    with pytest.raises(ScriptFailure) as failure:
        run_python(SCRIPT, *arguments, f"--deepspeed={config}")
    text = str(failure.value)
    assert "ConfigError" in text
    assert "/zero_optimization/stge" in text
    assert 'did you mean "stage"?' in text
    assert "/zero_optimization/overlap_comm" in text
    assert "/does/not/exist" not in text.rpartition("ConfigError")[2]


@pytest.mark.slow
def test_bf16_follows_fp32(tiny_model: Path, reference: Run, tmp_path: Path) -> None:
    content = {**AUTO_BATCH, "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    ours = run(tiny_model, tmp_path, f"--deepspeed={write_json(tmp_path / 'ds.json', content)}", "--bf16")
    for mine, theirs in zip(steps(ours.report), steps(reference.report), strict=True):
        key = "loss" if "loss" in theirs else "eval_loss"
        assert mine[key] == pytest.approx(theirs[key], rel=0.01)
        assert mine[key] != theirs[key]


@pytest.mark.slow
def test_model_built_from_its_config_under_stage_3(tiny_model: Path, tmp_path: Path) -> None:
    config = write_json(tmp_path / "ds.json", {**AUTO_BATCH, "zero_optimization": zero_section(3)})
    ours = run(tiny_model, tmp_path, f"--deepspeed={config}", "--from_scratch")
    losses = [row["loss"] for row in steps(ours.report) if "loss" in row]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(128.0)).item(), abs=0.2)
    assert all(value.numel() and torch.isfinite(value).all() for value in ours.weights().values())


@pytest.mark.slow
def test_evaluation_without_training_under_stage_3(tiny_model: Path, tmp_path: Path) -> None:
    config = write_json(tmp_path / "ds.json", {**AUTO_BATCH, "zero_optimization": zero_section(3)})
    plain = run(tiny_model, tmp_path / "plain", *PLAIN, "--evaluate_only")
    ours = run(tiny_model, tmp_path, f"--deepspeed={config}", "--evaluate_only")
    assert ours.report["final"]["eval_loss"] == pytest.approx(plain.report["final"]["eval_loss"], abs=TOLERANCE)


@pytest.mark.slow
def test_config_as_json_text_with_a_comment(tiny_model: Path, reference: Run, tmp_path: Path) -> None:
    text = json.dumps({**AUTO_BATCH, "zero_optimization": {"stage": 1}}).replace("{", "{ // by hand\n", 1)
    ours = run(tiny_model, tmp_path, f"--deepspeed={text}")
    assert largest_difference(steps(ours.report), steps(reference.report)) <= TOLERANCE
