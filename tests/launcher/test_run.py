"""Real processes on this machine: what they are given, how they fail, and that none stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ds_hf.launcher.cores import cores_by_rank, physical_cores
from tests.helpers.distributed import free_port

SCRIPT = Path(__file__).with_name("echo.py")
TRAINING = Path(__file__).parents[1] / "system" / "train_small.py"
ROOT = Path(__file__).parents[2]
START = "import sys; sys.argv[0] = 'deepspeed'; from ds_hf.launch_cli import deepspeed_main; deepspeed_main()"
LIMIT_S = 100.0
END_S = 15.0


def begin(folder: Path, *arguments: str, name: str = "log") -> subprocess.Popen[bytes]:
    """A `deepspeed` in ``folder``; its output goes to the file ``name`` there."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT}/ds_hf/compat"
    with open(folder / name, "wb") as log:
        return subprocess.Popen([sys.executable, "-c", START, *arguments], stdout=log, stderr=log, cwd=folder, env=env)


def finish(folder: Path, *arguments: str) -> tuple[int, str]:
    process = begin(folder, *arguments)
    try:
        return process.wait(LIMIT_S), (folder / "log").read_text()
    finally:
        process.kill()


def told(folder: Path, restart: int = 0) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"out_*_{restart}.json"))]


def wait_for(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + LIMIT_S
    while "".join(path.read_text() for path in folder.glob("log*")).count("is here") < count:
        assert time.monotonic() < limit, (folder / "log").read_text()
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.05)
    time.sleep(0.5)  # the scripts' own children


def left(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline())[:150])
        except psutil.Error:
            continue
    return found


def nothing_left(folder: Path, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while left(folder):
        assert time.monotonic() < limit, left(folder)
        time.sleep(0.1)


def end_all(folder: Path) -> None:
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                process.kill()
        except psutil.Error:
            continue


def test_processes_get_what_was_said(tmp_path: Path) -> None:
    with socket.socket() as taken:  # DeepSpeed's port is in use: another is found
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:
            pass  # by somebody else, then
        nasty = ["", "a b", "${local_rank} $$", "new\nline", "--num_gpus", "'"]
        code, output = finish(tmp_path, "--num_gpus", "2", "--prefix_output", str(SCRIPT), *nasty)
    assert code == 0, output
    ranks = told(tmp_path)
    assert [rank["argv"] for rank in ranks] == [[f"--local_rank={n}", *nasty] for n in range(2)]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert ranks[0]["MASTER_PORT"] != "29500"
    assert "[localhost 1] rank 1 is here" in output


def test_a_failing_rank_ends_all_and_is_told_first(tmp_path: Path) -> None:
    process = begin(tmp_path, "--num_gpus", "2", "--no_local_rank", str(SCRIPT), "fail")
    wait_for(tmp_path, 2, process)
    assert process.wait(END_S) == 1
    nothing_left(tmp_path, 1)  # not even rank 0's own child
    text = (tmp_path / "log").read_text()
    assert told(tmp_path)[0]["argv"] == ["fail"]
    start = text.index("ds_hf: rank 1 failed first: host localhost, local rank 1, exit code 1\nTraceback")
    assert text[start:].rstrip().endswith("ValueError: broken on purpose")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["wait", "stubborn"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing(what: str, signum: signal.Signals, tmp_path: Path) -> None:
    process = begin(tmp_path, "--num_gpus", "2", str(SCRIPT), what)
    wait_for(tmp_path, 2, process)
    process.send_signal(signum)
    assert process.wait(END_S) == 128 + signum
    nothing_left(tmp_path, 1)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_worker(tmp_path: Path) -> None:
    process = begin(tmp_path, "--num_gpus", "2", str(SCRIPT), "stubborn")
    wait_for(tmp_path, 2, process)
    process.kill()
    process.wait()
    limit = time.monotonic() + END_S
    while any("echo.py" in line for line in left(tmp_path)):
        assert time.monotonic() < limit, left(tmp_path)
        time.sleep(0.1)
    end_all(tmp_path)  # the scripts' own children, whom nobody knows any more


@pytest.mark.slow
def test_restarts_on_one_machine(tmp_path: Path) -> None:
    code, output = finish(tmp_path, "--num_gpus", "2", "--max_restarts", "1", str(SCRIPT), "fail")
    assert code == 0, output
    assert [rank["TORCHELASTIC_RESTART_COUNT"] for rank in told(tmp_path, 1)] == ["1", "1"]
    assert "starting again, attempt 1 of 1" in output
    end_all(tmp_path)  # children of workers that ended well are let be


def pair(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> list[subprocess.Popen[bytes]]:
    """Both hosts of a run without ssh, on this machine."""
    (folder / "log").touch()
    common = ["--no_ssh", "--num_nodes", "2", "--num_gpus", "1", "--master_addr", "127.0.0.1", *options]
    common += ["--master_port", str(free_port())]
    return [begin(folder, *common, "--node_rank", str(n), str(SCRIPT), *arguments, name=f"log{n}") for n in range(2)]


def test_a_failure_on_one_host_ends_the_other(tmp_path: Path) -> None:
    hosts = pair(tmp_path, "fail")
    try:
        wait_for(tmp_path, 2, hosts[0])
        assert [host.wait(END_S) for host in hosts] == [1, 1]
    finally:
        for host in hosts:
            host.kill()
    nothing_left(tmp_path, 1)
    text = (tmp_path / "log0").read_text()  # the first host tells
    assert "ds_hf: rank 1 failed first: host node1, local rank 0, exit code 1\nTraceback" in text
    assert "ValueError: broken on purpose" in text


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_stops_answering_ends_the_run(lost: int, tmp_path: Path) -> None:
    hosts = pair(tmp_path, "wait")
    try:
        wait_for(tmp_path, 2, hosts[0])
        hosts[lost].send_signal(signal.SIGSTOP)  # its network is as good as cut
        assert hosts[1 - lost].wait(30) == 1
        text = (tmp_path / f"log{1 - lost}").read_text()
        assert ("host node1 is lost" if lost else "nothing heard from host node0") in text
        hosts[lost].send_signal(signal.SIGCONT)
        assert hosts[lost].wait(30) != 0
    finally:
        for host in hosts:
            host.kill()
    nothing_left(tmp_path, 5)


@pytest.mark.slow
def test_hosts_started_one_by_one_restart_together(tmp_path: Path) -> None:
    hosts = pair(tmp_path, "fail", options=("--max_restarts", "1"))
    try:
        assert [host.wait(LIMIT_S) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    again = told(tmp_path, 1)
    assert [rank["RANK"] for rank in again] == ["0", "1"]
    assert again[0]["MASTER_PORT"] == again[1]["MASTER_PORT"] != told(tmp_path)[0]["MASTER_PORT"]
    end_all(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_elastic_run_goes_on_without_a_host(tmp_path: Path) -> None:
    common = ["--no_ssh", "--num_nodes", "2", "--num_gpus", "1", "--master_addr", "127.0.0.1", "--elastic_training"]
    common += ["--master_port", str(free_port()), "--min_elastic_nodes", "1", "--max_restarts", "2"]
    script = [str(TRAINING), "--folder", "saved", "--steps", "12", "--slow", "0.5"]
    hosts = [begin(tmp_path, *common, "--node_rank", str(n), *script, name=f"log{n}") for n in range(2)]

    def text() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("log*"))

    try:
        limit = time.monotonic() + LIMIT_S
        while "step 2 loss" not in text():
            assert time.monotonic() < limit, text()
            time.sleep(0.1)
        hosts[1].kill()  # the first one keeps the rendezvous
        assert hosts[0].wait(200) == 0, text()
    finally:
        for host in hosts:
            host.kill()
    again = re.findall(r"start rank 0 of 1 on .* at step (\d+)", text())
    assert len(again) == 1
    assert int(again[0]) >= 2
    assert "step 11 loss" in text()
    nothing_left(tmp_path, END_S)


@pytest.mark.slow
def test_cores_logs_pids_modules_and_programs(tmp_path: Path) -> None:
    (tmp_path / "echo_module.py").write_text(SCRIPT.read_text())
    processes = min(2, len(physical_cores()))
    options = ["--num_gpus", str(processes), "--bind_cores_to_rank", "--enable_each_rank_log", "logs", "--save_pid"]
    code, output = finish(tmp_path, *options, "--module", "echo_module")
    assert code == 0, output
    assert [rank["cores"] for rank in told(tmp_path)] == cores_by_rank(processes)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [path.name.rpartition("_")[2] for path in logs] == [f"rank{n}.log" for n in range(processes)]
    assert "rank 0 is here" in logs[0].read_text()
    assert "is here" not in output
    code, output = finish(tmp_path, "--no_python", "--no_local_rank", "sh", "-c", 'echo "$0 $RANK"', "program")
    assert (code, output) == (0, "program 0\n")


def test_what_cannot_be_started(tmp_path: Path) -> None:
    code, output = finish(tmp_path, "--no_python", "./missing")
    assert code == 1
    assert "./missing: No such file or directory" in output


def test_core_lists() -> None:
    from ds_hf.launcher.cores import parse_core_list
    from ds_hf.launcher.errors import LaunchError

    assert parse_core_list("0-2,5") == [0, 1, 2, 5]
    for text, column in (("0,x", 3), ("3-1", 1), ("0-2,2", 5), ("", 1), ("1,", 3), ("99999999999", 1)):
        with pytest.raises(LaunchError, match=f"column {column}: "):
            parse_core_list(text)
    with pytest.raises(LaunchError, match=r"cores for 4096 processes"):
        cores_by_rank(4096)
