"""How long tests wait: limits are for what hangs, and never judge how fast a machine is.

A limit in a test says what suffices on a quiet machine; it is multiplied by ``PATIENCE`` before it is used, so that the
suite passes beside other work. pytest's own limit (``timeout`` in pyproject.toml) lies above the longest of them.
"""

from __future__ import annotations

__all__ = ["PATIENCE"]

PATIENCE = 10
