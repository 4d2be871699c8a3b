"""``deepspeed.runtime``."""

from __future__ import annotations

from .._missing import missing
from . import dataloader, engine, lr_schedules, zero

__all__ = ["dataloader", "engine", "lr_schedules", "zero"]
__getattr__ = missing(__name__)
