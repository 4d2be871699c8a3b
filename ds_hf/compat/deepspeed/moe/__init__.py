"""``deepspeed.moe``: what scripts import for models that may have experts; those that have none train."""

from __future__ import annotations

from .._missing import missing
from . import utils

__all__ = ["utils"]
__getattr__ = missing(__name__)
