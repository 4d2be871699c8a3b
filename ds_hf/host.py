"""What a process can know of the host that it runs on: its share of the processes, the cores and the memory.

Memory is the machine's, or that of the container or job (control groups, also a job's own below the root, as SLURM and
systemd make them) where that is less: psutil alone tells of memory that the kernel will not give.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = [
    "available_memory",
    "has_gpu",
    "known_processes",
    "local_rank",
    "local_world_size",
    "rank_cores",
    "total_memory",
    "user_cache",
]

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def has_gpu() -> bool:
    """Whether there is one for this process, without importing torch, which takes seconds."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def known_processes() -> int | None:
    """How many processes of this run the host has; ``None`` where no launcher says so."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def local_world_size() -> int:
    """The same, 1 where it is not known."""
    return known_processes() or 1


def local_rank() -> int:
    """Number of this process among those of the host."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def rank_cores() -> list[int]:
    """The cores of this rank: an equal share of those that the process may use, at least one."""
    cores = sorted(os.sched_getaffinity(os.getpid()))  # the main thread's: others may be bound to less
    ranks = local_world_size()
    if ranks == 1:
        return cores
    share = max(1, len(cores) // ranks)
    first = local_rank() * share % len(cores)
    return cores[first : first + share]


def available_memory() -> int:
    """Bytes that the processes here may still get."""
    groups = (max(limit - taken, 0) for limit, taken in _limits())
    return min(int(psutil.virtual_memory().available), *groups, _ALL)


def total_memory() -> int:
    """Bytes that the processes here may have in all."""
    return min(int(psutil.virtual_memory().total), *(limit for limit, _ in _limits()), _ALL)


_ALL = 1 << 62  # more than there is, for where no group has a limit
_FILES = (  # of the two versions: folder, limit, use
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _limits() -> Iterator[tuple[int, int]]:
    """Of each group that this process is in: its limit, and what is taken of it and cannot be given back."""
    for below, limit, used in _FILES:
        for folder in _groups(ROOT / below, controller=below):
            try:
                most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # none, or "max"
                continue
            yield most, taken - _cached(folder / "memory.stat")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the group of this process and of those around it. In a container its own group is the root."""
    yield root
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [part for part in path.split("/") if part and part != ".."]
            yield from (root.joinpath(*parts[: depth + 1]) for depth in range(len(parts)))


def _cached(statistics: Path) -> int:
    """Bytes that hold files, which the kernel takes back when it needs them."""
    try:
        rows = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))


def user_cache() -> Path:
    """The folder for what is worth keeping between runs: ``$XDG_CACHE_HOME/ds_hf``, or ``~/.cache/ds_hf``, or of a user
    without a home one among temporary files."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if root.is_absolute():  # another is to be ignored
        return root / "ds_hf"
    try:
        return Path.home() / ".cache" / "ds_hf"
    except RuntimeError:  # a container whose user has no name
        return Path(tempfile.gettempdir()) / f"ds_hf-{os.geteuid()}"
