"""What a command has started is gone with it, whatever ends the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ds_hf.processes import signals_interrupt

SLEEPER = """
import os, sys, time, pathlib
pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
time.sleep(600)
"""
# Tests that run under nohup hand on that SIGHUP is ignored, and a command leaves it so.
COMMAND = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from ds_hf.cli import main; main()"
TOOLS = ("profile", "lr-find", "autotune")


def wait_for(done: object, limit_s: float) -> bool:
    assert callable(done)
    until = time.monotonic() + limit_s
    while not done() and time.monotonic() < until:
        time.sleep(0.1)
    return bool(done())


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended_by(signum: int, words: Sequence[str], folder: Path, workers: int) -> int:
    """Exit code of a command that got ``signum`` once its ``workers`` ran; they are gone then."""
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    (folder / "train.py").write_text(SLEEPER)
    (folder / "pids").mkdir()
    (folder / "out").mkdir()
    script = [str(folder / "train.py"), "--deepspeed", str(folder / "ds.json")]
    command = [sys.executable, "-c", COMMAND, *words, "-o", str(folder / "out"), *script]
    environment = {**os.environ, "PIDS": str(folder / "pids"), "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
    pids: list[int] = []
    try:
        assert wait_for(lambda: len(os.listdir(folder / "pids")) >= workers, 120), (folder / "said.txt").read_text()
        pids = [int(name) for name in os.listdir(folder / "pids")]
        process.send_signal(signum)
        code = process.wait(60)
        assert wait_for(lambda: not any(map(alive, pids)), 60), "workers train on"
        return code
    finally:
        process.kill()
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_command_that_is_told_to_end_ends_its_script(tmp_path: Path) -> None:
    words = ["profile", "--launcher", sys.executable]
    assert ended_by(signal.SIGTERM, words, tmp_path, 1) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("tool", TOOLS)
def test_workers_of_torchrun_are_gone_too(tool: str, signum: signal.Signals, tmp_path: Path) -> None:
    code = ended_by(signum, [tool, "-n", "2"], tmp_path, 2)
    if signum in (signal.SIGTERM, signal.SIGHUP):
        assert code == 128 + signum
    else:
        assert code != 0


def told_twice() -> None:
    with signals_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)  # does not cut the rest short


def test_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with signals_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SystemExit) as ended:
            told_twice()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
