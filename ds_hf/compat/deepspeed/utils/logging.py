"""``deepspeed.utils.logging``: ds_hf's logger, and a message from chosen ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds_hf.engine.dist.process_group import get_rank, is_initialized
from ds_hf.log import logger

from .._missing import missing

__all__ = ["log_dist", "logger"]


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the given ranks; None means rank 0, and -1 among them means all."""
    rank = get_rank() if is_initialized() else 0
    chosen = (0,) if ranks is None else ranks
    if -1 in chosen or rank in chosen:
        logger.log(level, "[rank %d] %s", rank, message)


__getattr__ = missing(__name__)
