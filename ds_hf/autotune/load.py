"""What other processes take of the machine while a launch runs: cores of the CPU, and shares of the GPUs.

A launch cannot be told from others by the GPU's own counters, so the GPUs are looked at before it starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

__all__ = ["LoadMeter", "gpu_share", "shares_gpu", "warning_of"]

EVERY_S = 1.0
MUCH = 0.15  # of the cores, or of a GPU
NVIDIA_SMI_S = 5.0
LOOKED_AT_S = 1.5


class LoadMeter:
    """Sampled now and then while a process and its children run.

    Only the cores that this process may use count. ``steal``, what a hypervisor gives to others, is others' too.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.cores = sorted(os.sched_getaffinity(0))
        self._own: dict[int, float] = {}  # process -> seconds of the CPU so far
        self._used = 0.0
        self._at = self._start = time.monotonic()
        self._busy_before = self._busy()

    def sample(self) -> None:
        """Look, if it is time to."""
        if time.monotonic() - self._at < EVERY_S:
            return
        self._at = time.monotonic()
        family = [os.getpid(), self.pid]
        with suppress(psutil.Error):
            family += [process.pid for process in psutil.Process(self.pid).children(recursive=True)]
        for pid in family:
            with suppress(psutil.Error):
                used = sum(psutil.Process(pid).cpu_times()[:2])
                before = self._own.get(pid, used if pid == os.getpid() else 0.0)
                self._used += max(0.0, used - before)
                self._own[pid] = used

    def result(self) -> dict[str, float]:
        """Cores that others used on average, of how many; nothing where it was too short to say."""
        seconds = self._at - self._start
        if seconds < EVERY_S:
            return {}
        others = max(0.0, self._busy() - self._busy_before - self._used) / (time.monotonic() - self._start)
        return {"cpu": min(others, float(len(self.cores))), "cores": float(len(self.cores))}

    def _busy(self) -> float:
        """Seconds in which the cores did something, or were kept from it."""
        every = psutil.cpu_times(percpu=True)
        times = [every[core] for core in self.cores if core < len(every)]
        return float(sum(sum(each[:3]) + sum(getattr(each, name, 0.0) for name in ("irq", "softirq", "steal"))
                         for each in times))  # fmt: skip


def gpu_share() -> float | None:
    """How busy the busiest GPU of those that this process sees is, from 0 to 1; ``None`` where that is not known.

    It is counted over the last second: what looks busy is looked at again, as it may be what a launch before has left.
    """
    share = _gpu_share()
    if share is not None and share > MUCH:
        time.sleep(LOOKED_AT_S)
        share = _gpu_share()
    return share


def _gpu_share() -> float | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        asked.append(f"--id={visible}")
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(asked, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
        return max((float(line) / 100 for line in said.split()), default=None)
    return None


def shares_gpu(load: Mapping[str, Any]) -> bool:
    """Whether others use a GPU, or that cannot be seen."""
    share = load.get("gpu")
    return share is None or float(share) > MUCH


def warning_of(load: Mapping[str, Any]) -> str:
    """A sentence where others took much; empty otherwise."""
    parts = []
    cpu, cores, gpu = (float(load.get(name) or 0.0) for name in ("cpu", "cores", "gpu"))
    if cores and cpu > MUCH * cores:
        parts.append(f"{cpu:.1f} of {cores:.0f} cores")
    if gpu > MUCH:
        parts.append(f"{gpu:.0%} of a GPU")
    return f"other processes used {' and '.join(parts)}" if parts else ""
