"""Training over a hostfile on two hosts (network namespaces, an sshd each), and every way in which it can end badly."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.hosts import Hosts
from tests.system.launching import CUT_S, END_S, LAUNCHERS, MARKS, START_S, Run, environment, stopped_at_the_end

pytestmark = MARKS

SCRIPT = Path(__file__).with_name("train_small.py")


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Run]]:

    def begin(*options: str, script: tuple[str, ...] = ()) -> Run:
        folder = tmp_path / "run"
        hostfile = f"{hosts.folder}/hostfile"
        runs.append(Run(hosts, folder, "-H", hostfile, *options, str(SCRIPT), "--folder", str(folder), *script))
        return runs[-1]

    with stopped_at_the_end() as runs:
        yield begin


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_train_together(launcher: str, start: Callable[..., Run]) -> None:
    run = start("--launcher", launcher, script=("--steps", "2"))
    assert run.wait(START_S) == 0, run.text
    starts = sorted(re.findall(r"start rank (\d) of 4 on (host-\w) at step 0", run.text))
    assert starts == [("0", "host-a"), ("1", "host-a"), ("2", "host-b"), ("3", "host-b")], run.text
    assert run.text.count("end rank") == 4
    run.nothing_left(5)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_rank_fails(launcher: str, start: Callable[..., Run]) -> None:
    run = start("--launcher", launcher, script=("--steps", "9", "--fail-at", "3,1"))
    run.until(lambda: "broken on purpose" in run.text, START_S, "the failure")
    assert run.wait(END_S) == 1
    run.nothing_left(1)
    summary = run.text[run.text.index("ds_hf: rank") :]
    assert "ds_hf: rank 3 failed first: host host-b, local rank 1, exit code 1" in summary
    first = summary.index("Traceback (most recent call last)")
    assert "ValueError: broken on purpose" in summary[first:]


def test_all_start_again_and_resume(start: Callable[..., Run]) -> None:
    run = start("--max_restarts", "1", script=("--steps", "4", "--fail-at", "2,2"))
    assert run.wait(START_S) == 0, run.text
    assert run.text.count("at step 0") == 4
    assert run.text.count("at step 2") == 4
    assert "starting again, attempt 1 of 1" in run.text
    losses = re.findall(r"step (\d) loss", run.text)
    assert losses == ["0", "1", "2", "3"], losses


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_nothing(launcher: str, signum: signal.Signals, start: Callable[..., Run]) -> None:
    run = start("--launcher", launcher, script=("--steps", "10000", "--slow", "0.1"))
    run.until_step(1)
    run.process.send_signal(signum)
    assert run.wait(END_S) == 128 + signum, run.text
    run.nothing_left(1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launcher_is_killed(launcher: str, start: Callable[..., Run]) -> None:
    run = start("--launcher", launcher, script=("--steps", "10000", "--slow", "0.1"))
    run.until_step(1)
    children = run.process.pid and psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    if launcher != "ssh":  # whose far side notices; these are orphans now, as after a dropped terminal
        for child in children:
            child.terminate()
    run.nothing_left(END_S)


@pytest.mark.parametrize(
    ("launcher", "lost"),
    [pytest.param(*one.values, 1, marks=one.marks) for one in LAUNCHERS] + [pytest.param("ssh", 0)],
)
def test_a_host_is_cut_off_and_training_resumes(
    launcher: str, lost: int, hosts: Hosts, start: Callable[..., Run]
) -> None:
    run = start("--launcher", launcher, script=("--steps", "10000", "--slow", "0.2"))
    run.until_step(2)
    hosts.cut(lost)
    try:
        code = run.wait(CUT_S)
        run.nothing_left(CUT_S)  # on the host that was cut off, too
    finally:
        hosts.cut(lost, off=False)
    assert code not in (0, None)
    done = max(int(step) for step in re.findall(r"step (\d+) loss", run.text))
    again = start("--launcher", launcher, script=("--steps", str(done + 3)))
    assert again.wait(START_S) == 0, again.text
    steps = {int(step) for step in re.findall(r"at step (\d+)", again.text)}
    assert len(steps) == 1
    assert done - 1 <= steps.pop() <= done + 2
    assert again.text.count("end rank") == 4


def test_accelerate_launches_several_machines(hosts: Hosts, tmp_path: Path) -> None:
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here (Debian: pdsh)")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines", "2"]
    command += ["--num_processes", "4", "--machine_rank", "0", "--main_process_port", "29611", "--zero_stage", "2"]
    command += ["--deepspeed_hostfile", f"{hosts.folder}/hostfile", "--deepspeed_multinode_launcher", "pdsh"]
    done = subprocess.run(
        [*command, str(SCRIPT), "--folder", str(tmp_path / "saved"), "--steps", "1"],
        env={**environment(hosts), "SPECIAL": "a'b $HOME"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / ".deepspeed_env").is_file()  # written by accelerate, read by us
    assert done.stdout.count("end rank") == 4


def test_hosts_that_are_not_ready_are_named(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host-a slots=1\nnowhere slots=1\n")
    done = subprocess.run(
        [f"{hosts.folder}/bin/deepspeed", "-H", str(hostfile), "x.py"],
        env=environment(hosts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "- host nowhere: ssh failed" in done.stderr
    assert "ssh-copy-id nowhere" in done.stderr
    assert "host-a" not in done.stderr
