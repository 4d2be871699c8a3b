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
from typing import Any

import psutil
import pytest
from torch.distributed import DistNetworkError
from typer.testing import CliRunner

from ds_hf.cli.root import app
from ds_hf.launcher import agent, front, node, resources
from ds_hf.launcher.cores import cores_by_rank, physical_cores
from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.failure import Failure, about_log, describe
from ds_hf.launcher.spec import GRACE_ENV, NodeSpec, decode, encode
from tests.helpers.distributed import free_port
from tests.helpers.patience import PATIENCE
from tests.helpers.started import ForkedProgram

SCRIPT = Path(__file__).with_name("echo.py")
TRAINING = Path(__file__).parents[1] / "system" / "train_small.py"
ROOT = Path(__file__).parents[2]
START = """
import os, sys
from ds_hf.launcher import front
from ds_hf.cli.launch import deepspeed_main
sys.argv[0] = "deepspeed"
front.DEFAULT_PORT = int(os.environ["TEST_PORT"])  # 29500 may be anybody's
deepspeed_main()
"""
LIMIT_S = 100.0 * PATIENCE
END_S = 15.0 * PATIENCE


def begin(folder: Path, *arguments: str, name: str = "log", start: Any = subprocess.Popen) -> Any:
    """A `deepspeed` in ``folder``; its output goes to the file ``name`` there.

    Args:
        start: ``ForkedProgram`` spares the import of torch by the launcher; what that starts is as ever.
    """
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT}/ds_hf/compat"
    env.setdefault("TEST_PORT", str(free_port()))
    with open(folder / name, "wb") as log:
        return start([sys.executable, "-c", START, *arguments], stdout=log, stderr=log, cwd=folder, env=env)


def finish(folder: Path, *arguments: str, start: Any = subprocess.Popen) -> tuple[int, str]:
    process = begin(folder, *arguments, start=start)
    try:
        return process.wait(LIMIT_S), (folder / "log").read_text()
    finally:
        process.kill()


def told(folder: Path, restart: int = 0) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"out_*_{restart}.json"))]


def wait_for(folder: Path, count: int, process: Any) -> None:
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


def test_processes_get_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # DeepSpeed's port is in use: another is found
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("TEST_PORT", port)
        nasty = ["", "a b", "${local_rank} $$", "new\nline", "--num_gpus", "'"]
        code, output = finish(tmp_path, "--num_gpus", "2", "--prefix_output", str(SCRIPT), *nasty)
    assert code == 0, output
    ranks = told(tmp_path)
    assert [rank["argv"] for rank in ranks] == [[f"--local_rank={n}", *nasty] for n in range(2)]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert ranks[0]["MASTER_PORT"] != port
    assert "[localhost 1] rank 1 is here" in output


def test_a_failing_rank_ends_all_and_is_told_first(tmp_path: Path) -> None:
    process = begin(tmp_path, "--num_gpus", "2", "--no_local_rank", str(SCRIPT), "fail", start=ForkedProgram)
    wait_for(tmp_path, 2, process)
    assert process.wait(END_S) == 1
    nothing_left(tmp_path, END_S)  # not even rank 0's own child
    text = (tmp_path / "log").read_text()
    assert told(tmp_path)[0]["argv"] == ["fail"]
    start = text.index("ds_hf: rank 1 failed first: host localhost, local rank 1, exit code 1\nTraceback")
    assert text[start:].rstrip().endswith("ValueError: broken on purpose")
    assert text.count("Traceback") == 1  # the process leaves it to the launcher


@pytest.mark.slow
@pytest.mark.parametrize("what", ["wait", "stubborn"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing(
    what: str, signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GRACE_ENV, "5")
    process = begin(tmp_path, "--num_gpus", "2", str(SCRIPT), what)
    wait_for(tmp_path, 2, process)
    process.send_signal(signum)
    assert process.wait(END_S) == 128 + signum
    nothing_left(tmp_path, END_S)


@pytest.mark.slow
def test_a_last_checkpoint_has_its_time(tmp_path: Path) -> None:
    """Longer than is left to a process after a failure."""
    process = begin(tmp_path, "--num_gpus", "2", str(SCRIPT), "save")
    wait_for(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S) == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == ["saved_0", "saved_1"]
    nothing_left(tmp_path, END_S)


def test_seconds_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"run_id": "r", "hosts": ["a"], "slots": [[0]], "command": ["x.py"]}
    monkeypatch.delenv(GRACE_ENV, raising=False)
    assert NodeSpec(**given).grace == 30
    monkeypatch.setenv(GRACE_ENV, "110")
    spec = NodeSpec(**given)
    monkeypatch.delenv(GRACE_ENV)
    assert decode(encode(spec)).grace == 110
    for wrong in ("soon", "0", "inf"):
        monkeypatch.setenv(GRACE_ENV, wrong)
        with pytest.raises(LaunchError, match=f"{GRACE_ENV} is '{wrong}'"):
            NodeSpec(**given)


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


@pytest.mark.slow
def test_a_failure_on_one_host_ends_the_other(tmp_path: Path) -> None:
    hosts = pair(tmp_path, "fail")
    try:
        wait_for(tmp_path, 2, hosts[0])
        assert [host.wait(END_S) for host in hosts] == [1, 1]
    finally:
        for host in hosts:
            host.kill()
    nothing_left(tmp_path, END_S)
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
        assert hosts[1 - lost].wait(LIMIT_S) == 1
        text = (tmp_path / f"log{1 - lost}").read_text()
        assert ("host node1 is lost" if lost else "nothing heard from host node0") in text
        hosts[lost].send_signal(signal.SIGCONT)
        assert hosts[lost].wait(LIMIT_S) != 0
    finally:
        for host in hosts:
            host.kill()
    nothing_left(tmp_path, END_S)


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
        assert hosts[0].wait(2 * LIMIT_S) == 0, text()
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
    (tmp_path / "program").write_bytes(b"\x7fELF")
    (tmp_path / "program").chmod(0o755)
    code, output = finish(tmp_path, "--no_python", "./program", start=ForkedProgram)
    assert code == 1
    assert "./program: Exec format error" in output


class _Began(Exception):
    """Something was started."""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch.py"], "there is no script nosuch.py in "),
        (["folder"], "folder is a folder, not a script"),
        (["--module", "nosuch.inside"], "there is no module nosuch "),
        (["--no_python", "./nosuch"], "there is no program ./nosuch to execute"),
        (["--enable_each_rank_log", "file/logs", "script.py"], "file/logs: Not a directory"),
        (["--num_gpus", "99999999", "script.py"], "--num_gpus is 99999999: no host has more than 4096"),
        (["--num_gpus", "4096", "script.py"], "--num_gpus is 4096: there is no GPU, and"),
        (["--no_ssh", "--node_rank", "0", "--num_nodes", "99999999", "script.py"], "--num_nodes is 99999999"),
    ],
)
def test_nothing_is_started_that_cannot_run(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_node(spec: object, node: int) -> int:
        raise _Began

    monkeypatch.setattr(front, "run_node", run_node)
    monkeypatch.setattr(resources, "gpu_count", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "file"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert f"ds_hf: {said}" in result.stderr or (said in result.stderr and result.stderr.startswith("ds_hf: "))
    assert "Traceback" not in result.stderr
    assert isinstance(CliRunner().invoke(app, ["run", "--quiet", "script.py"]).exception, _Began)


@pytest.mark.parametrize(("any_port", "count"), [(True, 3), (False, 1)])
def test_a_port_that_is_taken_since_it_was_looked_at(
    any_port: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where any port will do others are tried."""
    tried = []

    def run_workers(attempt: agent.Attempt, tell: object) -> bool:
        tried.append(attempt.port)
        raise DistNetworkError("failed to listen: name: EADDRINUSE, message: address already in use")

    monkeypatch.setattr(agent, "run_workers", run_workers)
    spec = NodeSpec("id", ["localhost"], [[0]], ["script.py"], master_port=29500, any_port=any_port)
    with pytest.raises(LaunchError, match="is taken by another program"):
        node._run_at_a_port(agent.Attempt(spec, 0, 0, spec.master_port), lambda failures: None)
    assert len(set(tried)) == count
    assert tried[0] == 29500


def test_a_rank_whose_log_cannot_be_opened_says_so(tmp_path: Path) -> None:
    """On another host, say, whose disk is full."""
    (tmp_path / "file").write_text("")
    setup = {"agent": os.getpid(), "local_rank_at": None, "cores": None, "log_dir": str(tmp_path / "file" / "logs"),
             "restart": None, "tells": True}  # fmt: skip
    command = [sys.executable, "-I", "-S", str(ROOT / "ds_hf" / "launcher" / "worker.py"), json.dumps(setup), "true"]
    env = {**os.environ, "LOCAL_RANK": "0", "RANK": "0", "DS_HF_LAUNCH_TIME": "now"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"ds_hf: --enable_each_rank_log: {tmp_path}/file/logs: Not a directory\n"


def test_failures_that_follow_are_a_line() -> None:
    first = Failure(1, 1, "a", 1, 3.0, "Traceback ...\nValueError: the cause\n")
    then = Failure(0, 0, "a", 1, 1.0, "Traceback ...\nRuntimeError: connection closed\n")
    text = describe([then, first])
    assert text.startswith("rank 1 failed first: host a, local rank 1, exit code 1\nTraceback")
    assert text.endswith("after it: rank 0 (a, exit code 1: RuntimeError: connection closed)")
    assert text.count("Traceback") == 1


def test_a_killed_process_may_have_had_no_memory() -> None:
    assert describe([Failure(0, 0, "a", -9, 1.0)]).endswith("when host memory has run out: `dmesg` tells")
    assert "dmesg" not in describe([Failure(0, 0, "a", -15, 1.0)])


def test_a_failure_names_the_log_that_has_the_output(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    words = ["--num_gpus", "1", "--enable_each_rank_log", "logs", "fails.py"]
    code, output = finish(tmp_path, *words, start=ForkedProgram)
    (log,) = (tmp_path / "logs").iterdir()
    assert code == 3
    assert output.rstrip().endswith(f"no traceback was recorded; what the process printed is in {log}")


@pytest.mark.parametrize("text", ["", "Traceback ...\nOSError: [Errno 28] No space left on device\n"])
def test_a_log_on_a_full_disk_is_told(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    told = describe([Failure(0, 0, "a", 1, 1.0, text, about_log(str(tmp_path / "rank0.log")))])
    assert f"what the process printed is in {tmp_path}/rank0.log, on a disk that is full: make room there" in told


def test_core_lists() -> None:
    from ds_hf.launcher.cores import parse_core_list

    assert parse_core_list("0-2,5") == [0, 1, 2, 5]
    for text, column in (("0,x", 3), ("3-1", 1), ("0-2,2", 5), ("", 1), ("1,", 3), ("99999999999", 1)):
        with pytest.raises(LaunchError, match=f"column {column}: "):
            parse_core_list(text)
    with pytest.raises(LaunchError, match=r"cores for 4096 processes"):
        cores_by_rank(4096)
