"""``deepspeed`` started on the launching host for the two others, and what is seen of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.patience import PATIENCE
from tests.system.hosts import Hosts, why_not

MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.xdist_group("two_hosts"),
]

ROOT = Path(__file__).parents[2]
PROGRAMS = {"ssh": "ssh", "pdsh": "pdsh", "openmpi": "mpirun"}
LAUNCHERS = [
    pytest.param(
        name, marks=pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} here (Debian: {package})")
    )
    for (name, program), package in zip(PROGRAMS.items(), ("openssh-client", "pdsh", "openmpi-bin"), strict=True)
]
START_S = 180.0 * PATIENCE
END_S = 15.0  # what the users are promised
CUT_S = 40.0  # a lost host must be noticed first


def environment(hosts: Hosts) -> dict[str, str]:
    """Of a shell on the launching host."""
    return {**os.environ, "PATH": hosts.path, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/ds_hf/compat"}


class Run:
    """One `deepspeed` on the launching host."""

    def __init__(self, hosts: Hosts, folder: Path, *command: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log{time.monotonic_ns()}"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [f"{hosts.folder}/bin/deepspeed", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(hosts),
                cwd=folder,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, done: Callable[[], object], seconds: float, what: str) -> float:
        """Wait for ``done()``; returns the seconds it took."""
        start = time.monotonic()
        while not done():
            assert time.monotonic() - start < seconds, f"{what}: not within {seconds} s\n{self.text}"
            time.sleep(0.05)
        return time.monotonic() - start

    def until_step(self, step: int) -> None:
        self.until(lambda: f"step {step} loss" in self.text or self.ended, START_S, f"step {step}")
        assert not self.ended, self.text

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> int:
        self.until(lambda: self.ended, seconds, "the end")
        return self.process.returncode

    def left(self) -> list[str]:
        """Processes of this run that are still there, on any host (they share the process table)."""
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                if str(self.folder) in line or process.cwd() == str(self.folder):
                    found.append(f"{process.pid} {line[:200]}")
            except psutil.Error:
                continue
        return found

    def nothing_left(self, seconds: float) -> None:
        self.until(lambda: not self.left(), seconds, f"processes left: {self.left()}")


@contextlib.contextmanager
def stopped_at_the_end() -> Iterator[list[Run]]:
    """A list for runs; what still goes on after the test is ended."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        if not run.ended:
            run.process.terminate()
            run.process.wait(30)
