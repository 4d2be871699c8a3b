"""The example of distillation: a student of half of the layers, with and without its teacher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.helpers.distributed import run_torchrun

SCRIPT = Path(__file__).parents[2] / "examples" / "distill.py"
SMALL = [
    "--hidden-size=32", "--vocab-size=512", "--block-size=32", "--teacher-layers=4", "--student-layers=2",
    "--teacher-steps=12", "--student-steps=6", "--batch-size=2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [["--stage=3", "--teacher-bits=8"], ["--stage=1"]], ids=["3, 8 bits", "1"])
def test_distills(tmp_path: Path, more: list[str]) -> None:
    output = run_torchrun(SCRIPT, f"--output={tmp_path}", *SMALL, *more, world_size=2, timeout=280)
    losses = dict(re.findall(r"^(teacher|student).*held-out loss ([\d.]+)$", output, re.MULTILINE))
    assert set(losses) == {"teacher", "student"}
    assert all(5.5 < float(loss) < 6.3 for loss in losses.values()), "ln(512) = 6.24 before training"
    steps = re.findall(r"student, distilled: step (\d)/6 ", output)
    assert steps[-1] == "6"
    student = LlamaForCausalLM.from_pretrained(tmp_path / "student")
    assert student.config.num_hidden_layers == 2
