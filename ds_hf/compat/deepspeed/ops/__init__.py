"""``deepspeed.ops``."""

from __future__ import annotations

from .._missing import missing
from . import adagrad, adam, aio, lion

__all__ = ["adagrad", "adam", "aio", "lion"]
__compatible_ops__ = {aio.AsyncIOBuilder.NAME: aio.AsyncIOBuilder().is_compatible()}
__getattr__ = missing(__name__)
