"""A Trainer that was started again by the agent goes on from the checkpoint that this run wrote, and from no other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ds_hf.hf import restart
from ds_hf.launcher.ports import free_port
from tests.helpers.distributed import run_distributed

ROOT = Path(__file__).parents[2]


def trainer(folder: Path, **changes: Any) -> Any:
    args = SimpleNamespace(deepspeed_plugin=object(), output_dir=str(folder), process_index=0, **changes)
    return SimpleNamespace(args=args, state=SimpleNamespace(global_step=0))


def checkpoint(folder: Path, step: int, age: float = 0.0) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    state = path / "trainer_state.json"
    state.write_text("{}")
    written = restart._created(psutil.Process(os.getppid())) + 1 - age
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


def test_goes_on_after_a_change_of_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that restarted its processes for a host that came, or lately came itself, counts no restart."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    path = checkpoint(tmp_path, 4)
    began = restart._created(psutil.Process())
    state = path / "trainer_state.json"
    os.utime(state, (began + 60, began + 60))  # written by this process: the first start
    assert call(trainer(tmp_path)) == ((), {})
    os.utime(state, (began + 0.5, began + 0.5))
    assert call(trainer(tmp_path)) == ((str(path),), {})
    assert state.stat().st_mtime > began + 1  # belongs to the run from now on, whoever is left of it
    agent = restart._created(psutil.Process(os.getppid()))
    os.utime(state, (agent - 60, agent - 60))  # of an earlier run
    assert call(trainer(tmp_path)) == ((), {})


def several(folder: str) -> Any:
    """Of two processes the second one's agent came after the checkpoint, and has restarted nothing."""
    real, rank = psutil.Process, dist.get_rank()
    agent = real(os.getppid()).create_time()

    class Late(real):
        def create_time(self) -> float:
            return float(super().create_time()) + 1000 * rank

    psutil.Process = Late  # type: ignore[misc]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(1 - rank)
    state = Path(folder, "checkpoint-4", "trainer_state.json")
    if rank == 0:
        state.parent.mkdir(parents=True)
        state.write_text("{}")
        os.utime(state, (agent + 500, agent + 500))
    dist.barrier()
    args = SimpleNamespace(deepspeed_plugin=object(), output_dir=folder, process_index=rank)
    asked = SimpleNamespace(args=args, state=SimpleNamespace(global_step=0))
    return restart.go_on_after_restart(lambda *given, **_: given, asked, (), {})


def test_a_process_begins_when_it_was_started() -> None:
    """psutil alone is up to a second early, and what was copied before the start then counts as this run's."""
    before = time.time()
    with subprocess.Popen(["sleep", "30"]) as process:
        began = restart._created(psutil.Process(process.pid))
        process.kill()
    assert before - 0.05 < began < time.time() + 0.05


def test_processes_that_see_different_things_agree(tmp_path: Path) -> None:
    assert run_distributed(several, 2, str(tmp_path)) == 2 * [(f"{tmp_path}/checkpoint-4",)]


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


ELASTIC = """
import json, os, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
out, pause, resume = sys.argv[1], float(sys.argv[2]), (sys.argv[3:] or [None])[0]
class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(pause)
        control.should_training_stop = bool(resume) and state.global_step == 14
    def on_log(self, args, state, control, logs=None, **_):
        if args.process_index == 0 and "loss" in logs:
            with open(out + "/log.jsonl", "a") as file:
                print(json.dumps([state.global_step, args.world_size, logs["loss"]]), file=file)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": (torch.arange(8) * i + i) % 32, "labels": (torch.arange(8) * i + i) % 32} for i in range(64)]
os.makedirs(out, exist_ok=True)
args = TrainingArguments(out, max_steps=40, save_steps=5, logging_steps=1, learning_rate=1e-2, report_to=[],
    deepspeed={"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
               "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2, 4], "version": 0.1}})
Trainer(model, args, train_dataset=rows, callbacks=[Tell()]).train(resume_from_checkpoint=resume)
"""


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_is_lost_and_another_comes(tmp_path: Path) -> None:
    """Two agents of torchrun as two hosts. With half of the processes the global batch stays, by accumulation."""
    (tmp_path / "train.py").write_text(ELASTIC)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/ds_hf/compat", "OMP_NUM_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    out = tmp_path / "out"
    port = free_port()

    def agent(*given: str, name: str) -> subprocess.Popen[bytes]:
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=10"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", *given]
        with (tmp_path / name).open("wb") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    def told() -> list[list[float]]:
        log = out / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def until(step: int, world: int) -> None:
        limit = time.monotonic() + 120
        while not any(row[0] >= step and row[1] == world for row in told()):
            assert time.monotonic() < limit, [path.read_text()[-2000:] for path in tmp_path.glob("log*")]
            time.sleep(0.2)

    def kill(process: subprocess.Popen[bytes]) -> None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()

    started: list[subprocess.Popen[bytes]] = []
    try:
        first = agent(str(out), "0.5", name="log0")  # has the store, and stays
        limit = time.monotonic() + 60
        while not listens(port):
            assert time.monotonic() < limit
            time.sleep(0.1)
        second = agent(str(out), "0.5", name="log1")
        until(12, 2)
        kill(second)
        until(22, 1)
        third = agent(str(out), "0.5", name="log2")
        until(40, 2)
        assert first.wait(60) == 0
        assert third.wait(60) == 0
    finally:
        for process in started:
            if process.poll() is None:
                kill(process)
            process.wait(10)
    rows = told()
    last = {int(step): loss for step, _, loss in rows}  # of steps that were made twice, the second time
    assert sorted(last) == list(range(1, 41))
    for step, _, loss in rows:
        assert loss == pytest.approx(last[int(step)], abs=2e-5)  # sums in another order
    text = (tmp_path / "log0").read_text()
    assert "training goes on from " + str(out / "checkpoint-10") in text
    sizes = [int(world) for _, world, _ in rows]
    assert [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size] == [2, 1, 2]

    hand = tmp_path / "hand"  # the same by hand, on one process
    command = [sys.executable, "train.py", str(hand), "0", str(out / "checkpoint-10")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    by_hand = [json.loads(line)[::2] for line in (hand / "log.jsonl").read_text().splitlines()]
    assert by_hand == [[step, loss] for step, world, loss in rows if world == 1][:4]
    assert [step for step, _ in by_hand] == [11, 12, 13, 14]
