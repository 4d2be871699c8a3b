"""``--bind_cores_to_rank``: which cores each process of a host may use.

One logical processor of each physical core, cut into equal contiguous parts in order, as DeepSpeed does. Memory follows
by itself: Linux allocates on the node of the core that touches a page first.
"""

from __future__ import annotations

import os
from pathlib import Path

from ds_hf.launcher.errors import LaunchError, mistake

__all__ = ["cores_by_rank", "numa_cores", "parse_core_list", "physical_cores"]

MAX_CORE = 1 << 16


def parse_core_list(text: str, option: str = "--bind_core_list") -> list[int]:
    """``0-3,8`` as [0, 1, 2, 3, 8]; ascending, without overlap.

    Raises:
        LaunchError: names the column of the first mistake.
    """
    cores: list[int] = []
    column = 1
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdecimal() and len(end) < 9 and int(end) < MAX_CORE for end in ends):
            raise mistake(option, 1, column, text, f"{part[:40]!r} is not a core number", "write such as 0-3,8")
        start, stop = map(int, ends)
        if start > stop or (cores and start <= cores[-1]):
            raise mistake(option, 1, column, text, "cores must ascend and not overlap", "write such as 0-3,8")
        cores.extend(range(start, stop + 1))
        column += len(part) + 1
    return cores


def physical_cores() -> list[int]:
    """The first logical processor of each physical core that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    found, taken = [], set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            key = siblings.read_text().strip()
        except OSError:
            key = str(cpu)
        if key not in taken:
            taken.add(key)
            found.append(cpu)
    return found


def cores_by_rank(processes: int, core_list: str = "") -> list[list[int]]:
    """Cores of each of ``processes`` processes; ``core_list`` ``""`` takes all physical cores."""
    cores = parse_core_list(core_list) if core_list else physical_cores()
    missing = sorted(set(cores) - set(os.sched_getaffinity(0)))
    if missing:
        raise LaunchError(f"--bind_core_list: there is no core {missing[0]} here, or this process may not use it")
    each = len(cores) // processes
    if each == 0:
        raise LaunchError(
            f"--bind_cores_to_rank: {len(cores)} cores for {processes} processes\n  fix: fewer processes, or no binding"
        )
    return [cores[rank * each : (rank + 1) * each] for rank in range(processes)]


def numa_cores() -> list[list[int]]:
    """The logical processors of each NUMA node, nodes without any (memory alone) included; [] where none is known."""
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    found = []
    for node in sorted(nodes, key=lambda path: int(path.name.removeprefix("node"))):
        text = (node / "cpulist").read_text().strip()
        found.append(parse_core_list(text, str(node / "cpulist")) if text else [])
    return found
