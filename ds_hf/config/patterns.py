"""Regular expressions from files of strangers: those with which matching a name may take for ever are not tried."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

__all__ = ["may_take_long"]

_MOST_STEPS = 10**7  # that matching one pattern with one name may take


def may_take_long(pattern: str, names: Iterable[str]) -> bool:
    """Whether matching ``pattern`` with the longest of ``names`` may take more than a moment."""
    return _steps(pattern, max(map(len, names), default=0)) > _MOST_STEPS


def _steps(pattern: str, length: int) -> float:
    """How much work a pattern may make: repeats can end anywhere, what is optional or alternative twice."""
    plain = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "c", re.sub(r"\\[^dDwWsS1-9]", "c", pattern))
    if re.search(r"\)\s*[*+{]|\\[1-9]|\(\?P=", plain):
        return math.inf
    groups = math.prod(float(1 + part.count("|")) for part in plain.split("("))
    optional = len(re.findall(r"(?<![(*+?}])\?", plain))
    return float(length) ** len(re.findall(r"[*+{]", plain)) * groups * 2.0**optional
