"""The demo's model as a pipeline on two processes: a stage is killed, the run resumes and reaches the demo's loss."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.distributed import free_port, run_torchrun
from tests.helpers.patience import patient

SCRIPT = Path(__file__).parents[2] / "examples" / "train_pipeline.py"
DEMO = 5.28  # held-out loss of ``make demo`` after as many steps with the same batch and rate


def kill_a_stage(out: Path, log: Path) -> int:
    """Start, kill the last stage after the first checkpoint; the exit code of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    with log.open("w") as file:
        run = subprocess.Popen(
            [*command, str(SCRIPT), f"--output_dir={out}"],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + patient(240)
        while not (out / "checkpoints" / "latest").exists():
            assert run.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        found = re.search(r"stage 1 of 2: process (\d+)", log.read_text())
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        return run.wait(patient(60))
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_stage_and_the_demos_loss(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log.txt"
    assert kill_a_stage(out, log) != 0
    assert "step  120" not in log.read_text()
    output = run_torchrun(SCRIPT, f"--output_dir={out}", "--resume", world_size=2, timeout=280)
    losses = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) +held-out loss +([\d.]+)", output)}
    assert output.count("7 layers on 2 stages by parameters") == 1
    first, last = sorted(losses)
    assert first in (40, 80)
    assert last == 120
    assert losses[120] < DEMO < losses[first]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert (model.config.hidden_size, len(model.model.layers)) == (128, 4)
