"""Which process failed first, and how it is told.

torch's agent knows exit codes and, where the worker recorded it (``engine.comm.failure_record``), the traceback and its
time. Ages and not clock times travel between hosts, so that their clocks may differ.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Failure", "about_log", "describe", "first_of", "from_json"]

_FULL = 1 << 12  # bytes that are left: less than a block
SIGTERM_CODES = (-int(signal.SIGTERM), -int(signal.SIGKILL))


@dataclass(frozen=True)
class Failure:
    """One process that ended with an error.

    ``age`` is how many seconds ago, ``text`` its traceback or ``""``, ``log`` where its output is, if
    that was not shown.
    """

    rank: int
    local_rank: int
    host: str
    code: int
    age: float
    text: str = ""
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def from_json(value: dict[str, Any]) -> Failure:
    """The inverse of ``as_json``."""
    return Failure(**value)


def first_of(failures: Sequence[Failure]) -> Failure:
    """The one that happened first; one that was ended by a signal of ours comes last."""
    return min(failures, key=lambda failure: (not failure.text and failure.code in SIGTERM_CODES, -failure.age))


def exit_code(code: int) -> int:
    """What a shell shows for ``code``: 128 + signal for a process ended by a signal."""
    return 128 - code if code < 0 else code


def describe(failures: Sequence[Failure]) -> str:
    """The first failure with its traceback, then the others in a line."""
    first = first_of(failures)
    head = f"rank {first.rank} failed first: host {first.host}, local rank {first.local_rank}, {_end(first.code)}"
    printed = f"what the process printed is {first.log or 'above'}"
    if not first.text:
        body = f"no traceback was recorded; {printed}"
        if first.code == -signal.SIGKILL:
            body += "\nSIGKILL often comes from the kernel, when host memory has run out: `dmesg` tells"
    else:
        body = first.text.rstrip() + (f"\n{printed}" if first.log else "")
    others = sorted((f for f in failures if f.rank != first.rank), key=lambda failure: failure.rank)
    said = _last_line(first.text)
    listed = ", ".join(
        f"rank {f.rank} ({f.host}, {_end(f.code)}{_last_line(f.text) if _last_line(f.text) != said else ''})"
        for f in others[:8]
    )
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    after = f"\nafter it: {listed}{more}" if others else ""
    return f"{head}\n{body}{after}"


def about_log(path: str) -> str:
    """Where the output is, for ``Failure.log``. A full disk ends what prints, and nothing in the file says so."""
    try:
        disk = os.statvfs(os.path.dirname(path))
        full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < _FULL
    except OSError:
        full = False
    return f"in {path}{', on a disk that is full: make room there, or give another folder for logs' if full else ''}"


def _last_line(text: str) -> str:
    """What was raised, in so many words: one traceback is enough."""
    line = text.strip().rpartition("\n")[2].strip()
    return f": {line[:157]}..." if len(line) > 160 else f": {line}" if line else ""


def _end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
