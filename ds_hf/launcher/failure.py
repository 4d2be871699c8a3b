"""Which process failed first, and how it is told.

torch's agent knows exit codes and, where the worker recorded it (``engine.comm.failure_record``), the traceback and its
time. Ages and not clock times travel between hosts, so that their clocks may differ.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Failure", "describe", "first_of", "from_json"]

SIGTERM_CODES = (-int(signal.SIGTERM), -int(signal.SIGKILL))


@dataclass(frozen=True)
class Failure:
    """One process that ended with an error; ``age`` is how many seconds ago, ``text`` its traceback or ``""``."""

    rank: int
    local_rank: int
    host: str
    code: int
    age: float
    text: str = ""

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
    body = first.text.rstrip() or "no traceback was recorded; what the process printed is above"
    others = sorted((f for f in failures if f.rank != first.rank), key=lambda failure: failure.rank)
    listed = ", ".join(f"rank {f.rank} ({f.host}, {_end(f.code)}{_last_line(f.text)})" for f in others[:8])
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    after = f"\nafter it: {listed}{more}" if others else ""
    return f"{head}\n{body}{after}"


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
