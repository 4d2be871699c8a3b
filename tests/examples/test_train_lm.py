"""The demo's script: learns, and resumes exactly, without the name ds_hf in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_hf.config import load_config
from tests.helpers.distributed import run_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_lm.py"
SMALL = ["--vocab_size=1024", "--hidden_size=64", "--num_hidden_layers=2", "--block_size=64", "--max_eval_blocks=32"]
SHORT = ["--max_steps=12", "--eval_steps=6", "--save_steps=6", "--logging_steps=3", "--save_total_limit=3"]


def _run(out: Path, config: str, *more: str) -> dict[int, float]:
    """Held-out loss by step, from the table that the script prints."""
    arguments = [f"--output_dir={out}", f"--deepspeed={EXAMPLES / config}", *SMALL, *SHORT, *more]
    output = run_torchrun(SCRIPT, *arguments, world_size=2, timeout=280)
    rows = re.findall(r"^\s+(\d+)\s+(\d+\.\d+)\s+[\d.]+(?:\s+\(.*\))?$", output, re.MULTILINE)
    assert re.search(r"tokens in [\d.]+ s of training: [\d,]+ tokens/s on 2 processes", output)
    assert len(re.findall(r"The model continues", output)) == 1, "one process prints"
    return {int(step): float(loss) for step, loss in rows}


def test_script_has_nothing_of_ds_hf_in_it() -> None:
    code = re.sub(r'"""(?:.|\n)*?"""', "", SCRIPT.read_text())
    assert "ds_hf" not in code
    assert "import deepspeed" not in code


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_configurations_are_valid_and_name_the_schema(path: Path) -> None:
    config = load_config(path, allow_auto=True)
    assert str(config.zero_optimization.stage) in path.stem
    schema = json.loads(path.read_text())["$schema"]
    assert (path.parent / schema).resolve().is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", ["ds_config_zero2.json", "ds_config_zero3.json"])
def test_learns_and_resumes_exactly(tmp_path: Path, config: str) -> None:
    whole = _run(tmp_path, config)
    assert sorted(whole) == [0, 6, 12]
    assert abs(whole[0] - 6.93) < 0.2, "ln(1024) before training"
    assert whole[12] < whole[6] < whole[0]
    assert whole[12] < whole[0] - 0.5
    resumed = _run(tmp_path, config, f"--resume_from_checkpoint={tmp_path / 'checkpoint-6'}")
    assert resumed == pytest.approx(whole, abs=2e-4)
