"""transformers' checkpoint upon a signal: one process or the agent is asked, and all save the same step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_hf.checkpoint.verify import verify

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
stage, background, accumulation = int(sys.argv[1]), sys.argv[2] == "async", int(sys.argv[3])
resume = sys.argv[4] == "resume"
class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.2 if sys.argv[4] == "slowly" else 0.0)
    def on_log(self, args, state, control, logs=None, **_):
        if args.process_index == 0 and "loss" in logs:
            with open(f"log{sys.argv[5]}", "a") as file:
                print(json.dumps([state.global_step, logs["loss"]]), file=file)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": (torch.arange(8) * i + i) % 32, "labels": (torch.arange(8) * i + i) % 32} for i in range(64)]
args = TrainingArguments("out", max_steps=40, save_steps=1000, logging_steps=1, learning_rate=1e-2, report_to=[],
    per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, enable_jit_checkpoint=True,
    deepspeed={"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
               "ds_hf": {"checkpoint": {"async": background, "grace": 60}}, "train_micro_batch_size_per_gpu": "auto",
               "gradient_accumulation_steps": "auto"})
open(f"pid{args.process_index}", "w").write(str(os.getpid()))
trainer = Trainer(model, args, train_dataset=rows, callbacks=[Tell()])
trainer.train(resume_from_checkpoint=True if resume else None)
print("ended at", trainer.state.global_step, flush=True)
"""


def start(folder: Path, *given: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/ds_hf/compat", "OMP_NUM_THREADS": "1"}
    with (folder / "text").open("w") as text:
        return subprocess.Popen(
            [*command, *map(str, given)], cwd=folder, env=env, text=True, stdout=text, stderr=subprocess.STDOUT
        )


def losses(folder: Path, name: str) -> dict[int, float]:
    path = folder / f"log{name}"
    return dict(map(tuple, map(json.loads, path.read_text().splitlines()))) if path.exists() else {}


def ended(process: subprocess.Popen[str], limit: float = 60.0) -> int:
    try:
        return process.wait(limit)
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.wait(10)


def to_rank(rank: int, signum: int, times: int = 1) -> Callable[[Path, int], None]:
    def send(folder: Path, agent: int) -> None:
        for _ in range(times):
            os.kill(int((folder / f"pid{rank}").read_text()), signum)
            time.sleep(0.3)

    return send


def to_all(folder: Path, agent: int) -> None:
    for rank in (1, 0):
        to_rank(rank, signal.SIGTERM)(folder, agent)


def to_agent(folder: Path, agent: int) -> None:
    os.kill(agent, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stage", "how", "accumulation", "send"),
    [
        (2, "plain", 1, to_rank(1, signal.SIGTERM)),
        (3, "async", 2, to_rank(0, signal.SIGTERM, times=2)),
        (3, "plain", 2, to_all),
        (1, "async", 1, to_rank(1, signal.SIGUSR1)),
        (2, "async", 1, to_agent),
    ],
    ids=["one", "twice", "all", "usr1", "agent"],
)
def test_whole_and_resumed(
    stage: int, how: str, accumulation: int, send: Callable[[Path, int], None], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    cut = start(tmp_path, stage, how, accumulation, "slowly", "cut")
    limit = time.monotonic() + 90
    while len(losses(tmp_path, "cut")) < 5:
        assert time.monotonic() < limit, (tmp_path / "text").read_text()[-2000:]
        time.sleep(0.1)
    send(tmp_path, cut.pid)
    code = ended(cut)
    text = (tmp_path / "text").read_text()
    assert (code == 0) is (send is not to_agent), text[-2000:]
    assert text.count("ended at ") == 2
    saved = [path.name for path in (tmp_path / "out").iterdir()]
    step = max(losses(tmp_path, "cut"))
    assert saved == [f"checkpoint-{step}"]
    assert step < 40
    assert f"checkpoint-{step} is whole" in text
    assert verify(tmp_path / "out" / saved[0]) == []
    assert ended(start(tmp_path, stage, how, accumulation, "resume", "rest")) == 0, (tmp_path / "text").read_text()
    rest = losses(tmp_path, "rest")
    (tmp_path / "out").rename(tmp_path / "before")
    assert ended(start(tmp_path, stage, how, accumulation, "afresh", "whole")) == 0
    assert {**losses(tmp_path, "cut"), **rest} == losses(tmp_path, "whole")
    assert sorted(rest) == list(range(step + 1, 41))
