"""The one logger of ds_hf (``deepspeed.utils.logger`` is this object) and rank-aware helpers."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["log_once", "logger", "say", "warn_once"]

logger = logging.getLogger("ds_hf")
_seen: set[str] = set()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log ``message`` once a process, on rank 0 only."""
    if message not in _seen:
        _seen.add(message)
        if _rank() == 0:
            logger.log(level, message)


def warn_once(message: str) -> None:
    """Warn with ``message`` once a process, on rank 0 only."""
    log_once(message, logging.WARNING)


def say(text: str) -> None:
    """What the user asked for, on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
