"""A Trainer that was started again by the agent goes on from the checkpoint that this run wrote, and from no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ds_hf.hf import restart

ROOT = Path(__file__).parents[2]


def trainer(folder: Path, **changes: Any) -> Any:
    args = SimpleNamespace(deepspeed_plugin=object(), output_dir=str(folder), process_index=0, **changes)
    return SimpleNamespace(args=args, state=SimpleNamespace(global_step=0))


def checkpoint(folder: Path, step: int, age: float = 0.0) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    state = path / "trainer_state.json"
    state.write_text("{}")
    written = psutil.Process(os.getppid()).create_time() + 1 - age
    os.utime(state, (written, written))
    return path


def call(target: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return restart.go_on_after_restart(lambda *a, **k: (a, k), target, args, kwargs)  # type: ignore[no-any-return]


def test_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 10)
    assert call(trainer(tmp_path)) == ((), {})  # the first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert call(trainer(tmp_path)) == ((str(newest),), {})
    assert call(trainer(tmp_path), resume_from_checkpoint=None) == ((str(newest),), {})
    assert call(trainer(tmp_path), "given", None) == ((str(newest), None), {})


def test_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert call(trainer(tmp_path / "none"), "given") == (("given",), {})
    checkpoint(tmp_path, 5, age=100.0)  # of an earlier run
    assert call(trainer(tmp_path), "given") == (("given",), {})
    checkpoint(tmp_path, 6)
    trained = trainer(tmp_path)
    trained.state.global_step = 3  # a second train() of this process
    plain = trainer(tmp_path)
    plain.args.deepspeed_plugin = None
    assert call(trained) == call(plain) == ((), {})
    assert call(trainer(tmp_path), trial=object())[0] == ()


SCRIPT = """
import os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
class Break(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        os.write(1, f"step {state.global_step} of rank {args.process_index}\\n".encode())  # at once
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and state.global_step == 3 and args.process_index == 1:
            raise ValueError("broken on purpose")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": torch.arange(8) + i % 8, "labels": torch.arange(8) + i % 8} for i in range(32)]
args = TrainingArguments("out", max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
                         deepspeed={"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"})
Trainer(model, args, train_dataset=rows, callbacks=[Break()]).train()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/ds_hf/compat", "OMP_NUM_THREADS": "1"}
    code = "import sys; from ds_hf.cli.launch import deepspeed_main; deepspeed_main()"
    options = ["--num_gpus", "2", "--max_restarts", "1", "--no_local_rank"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "train.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.endswith("of rank 0")]
    assert [line.split()[1] for line in steps][-2:] == ["3", "4"]
    assert [line.split()[1] for line in steps].count("1") == 1  # not from the start again
    assert "training goes on from out/checkpoint-2" in done.stderr.replace(f"{tmp_path}/", "")
