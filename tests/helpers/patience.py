"""How long tests wait: limits are for what hangs, and never judge how fast a machine is.

A limit in a test says what suffices on a quiet machine; it is multiplied by ``PATIENCE`` before it is used, so that the
suite passes beside other work. pytest's own limit (``timeout`` in pyproject.toml) lies above ``LONGEST_S``: the helpers
that start processes end first, and show the stacks of all of them.
"""

from __future__ import annotations

__all__ = ["LONGEST_S", "PATIENCE", "patient"]

PATIENCE = 10
LONGEST_S = 1100.0


def patient(seconds: float, patience: float = PATIENCE) -> float:
    """The limit that is used for one that suffices on a quiet machine."""
    return min(seconds * patience, max(seconds, LONGEST_S))
