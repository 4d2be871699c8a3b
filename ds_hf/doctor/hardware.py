"""Of ``ds-hf doctor``: free memory, links between GPUs, NCCL, disk speed; most purely read what a tool printed.

GPUs are asked through ``nvidia-smi``, which comes with the driver and makes no CUDA context (torch's own question takes
half a gigabyte of the memory that it asks about).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DiskSpeed",
    "ListedGpu",
    "disk_speed",
    "gpus",
    "links",
    "neighbour_speed",
    "parse_gpus",
    "parse_links",
    "shm_nbytes",
]

ASK_S = 20
DISK_NBYTES = 128 << 20
DISK_S = 1.5  # of writing, and of reading: a slow disk is measured on less
_LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through one NUMA node",
    "SYS": "PCIe across NUMA nodes",
}


@dataclass(frozen=True)
class ListedGpu:
    """One GPU as nvidia-smi sees it, whatever CUDA_VISIBLE_DEVICES says; memory in MiB."""

    index: int
    name: str
    free_mib: int
    total_mib: int
    driver: str


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes a second, one stream."""

    write: float
    read: float


def gpus() -> list[ListedGpu]:
    """The GPUs of this machine; none where there is no nvidia-smi or no driver."""
    query = "index,memory.free,memory.total,driver_version,name"
    return parse_gpus(_ask("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> list[ListedGpu]:
    """Read the table; lines that are none of it (messages, ``[N/A]``) are passed over."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 4)]
        if len(cells) == 5 and all(cell.isdecimal() for cell in cells[:3]):
            found.append(ListedGpu(int(cells[0]), cells[4], int(cells[1]), int(cells[2]), cells[3]))
    return found


def links() -> str:
    """How the GPUs are connected, in a line; ``""`` when there is nothing to connect."""
    return parse_links(_ask("nvidia-smi", "topo", "-m"))


def parse_links(text: str) -> str:
    """Read the matrix of ``nvidia-smi topo -m``: pairs of GPUs by kind of link."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    matrix = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and not row[1].startswith("GPU")]
    count = len(matrix)
    kinds = Counter(matrix[i][j + 1] for i in range(count) for j in range(i + 1, count) if j + 1 < len(matrix[i]))
    parts = [f"{_link(kind)} between {number} {'pair' if number == 1 else 'pairs'}" for kind, number in kinds.items()]
    return "; ".join(parts)


def neighbour_speed(nbytes: int = 64 << 20, rounds: int = 8) -> float | None:
    """Bytes a second of copies from the first GPU to the second, as tensor-parallel neighbours send; ``None`` where
    there are not two, or they have no memory left for it."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return None
    try:
        source = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    except torch.cuda.OutOfMemoryError:
        return None
    target.copy_(source)  # the first copy opens the way
    for device in (0, 1):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    return rounds * nbytes / (time.perf_counter() - start)


def _link(kind: str) -> str:
    nvlink = re.fullmatch(r"NV(\d+)", kind)
    return f"NVLink ({nvlink.group(1)} links)" if nvlink else _LINKS.get(kind, kind)


def shm_nbytes() -> int | None:
    """Size of /dev/shm, where NCCL and data loaders of one machine meet; None if there is none."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def disk_speed(folder: Path, nbytes: int = DISK_NBYTES) -> DiskSpeed:
    """Write a file of ``nbytes`` into ``folder``, sync it, read it back from the disk, delete it.

    Raises:
        OSError: the folder cannot be written.
    """
    block = os.urandom(4 << 20)
    descriptor, name = tempfile.mkstemp(prefix=".ds_hf_disk_", dir=folder)
    try:
        start, written = time.perf_counter(), 0
        while written < nbytes and time.perf_counter() - start < DISK_S:
            written += os.write(descriptor, block)
        os.fsync(descriptor)
        write_s = time.perf_counter() - start
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        start, read = time.perf_counter(), 0
        while (part := len(os.read(descriptor, len(block)))) and time.perf_counter() - start < DISK_S:
            read += part
        read_s = time.perf_counter() - start
    finally:
        os.close(descriptor)
        os.unlink(name)
    return DiskSpeed(written / write_s, max(read, 1) / max(read_s, 1e-9))


def _ask(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What a program prints; ``""`` if it is not there, fails or hangs (a sick driver does)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
