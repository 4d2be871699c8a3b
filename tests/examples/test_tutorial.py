"""docs/tutorial.md: its commands, one after another in an empty folder, with a smaller model and a shorter search."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT, commands

TUTORIAL = ROOT / "docs" / "tutorial.md"
SMALL = "--vocab_size 512 --hidden_size 32 --num_hidden_layers 2 --block_size 32 --max_eval_blocks 16"
SHORTER = {  # only lengths change, and the model; what is left of a page's command is as written
    "examples/train_lm.py ": f"examples/train_lm.py {SMALL} ",
    "--budget 2m": "--budget 5m --trials 2 --no-confirm",
    "ds-hf lr-find": "ds-hf lr-find --steps 12 --seeds 1 --confirm-steps 0 --train-batches 4 --held-out-batches 2",
}


def test_only_existing_files_are_named() -> None:
    words = [word for line in commands(TUTORIAL) for word in line.split()]
    assert "examples/train_lm.py" in words
    assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))
    assert commands(TUTORIAL)[0] == 'pip install ".[all]"'


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.minutes(10)
def test_from_a_trainer_script_to_a_tuned_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for line in commands(TUTORIAL)[1:]:
        for words, shorter in SHORTER.items():
            line = line.replace(words, shorter)
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, text=True, check=False, timeout=600,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(f"$ {line}\n{done.stdout[-2500:]}")
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert json.loads((tmp_path / "out" / "lr" / "lr_result.json").read_text())
    assert (tmp_path / "out" / "tuning" / "report.html").is_file()
    for folder in ("out/tuned", "out/model"):  # of the Trainer, and what was converted from its checkpoint
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        tokens = AutoTokenizer.from_pretrained(tmp_path / folder)("def main():", return_tensors="pt").input_ids
        assert model(input_ids=tokens).logits.isfinite().all()
