"""Messages of chosen ranks, and ranges for a profiler: what scripts take from DeepSpeed's utilities."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.comm.process_group import current_rank
from ds_hf.log import logger, set_log_level_from_string, warn_once

__all__ = [
    "instrument_w_nvtx",
    "log_dist",
    "print_json_dist",
    "set_log_level_from_string",
    "warning_once",
]

F = TypeVar("F", bound=Callable[..., Any])


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


def instrument_w_nvtx(func: F) -> F:
    """Show each call of ``func`` as a range in a profiler that listens."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = get_accelerator()
        device.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            device.range_pop()

    return wrapped  # type: ignore[return-value]


def _is_chosen(ranks: Sequence[int] | None) -> bool:
    chosen = (0,) if ranks is None else ranks
    return -1 in chosen or current_rank() in chosen
