"""``deepspeed.utils.logging``: ds_hf's logger, and messages of chosen ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hf.engine.comm.process_group import current_rank
from ds_hf.log import logger, set_log_level_from_string, warn_once

__all__ = [
    "log_dist",
    "logger",
    "print_json_dist",
    "set_log_level_from_string",
    "warning_once",
]


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the given ranks; None means rank 0, and -1 among them means all."""
    if _is_chosen(ranks):
        logger.log(level, "[rank %d] %s", current_rank(), message)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | Path | None = None
) -> None:
    """Write ``message`` as JSON to ``path`` on the given ranks, with the rank in it."""
    if _is_chosen(ranks) and path is not None:
        Path(path).write_text(json.dumps({**message, "rank": current_rank()}))


def warning_once(message: str, *_: Any) -> None:
    """Warn once a process."""
    warn_once(message)


def _is_chosen(ranks: Sequence[int] | None) -> bool:
    chosen = (0,) if ranks is None else ranks
    return -1 in chosen or current_rank() in chosen
