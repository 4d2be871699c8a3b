"""``deepspeed.runtime.sequence_parallel``."""

from __future__ import annotations

from ..._missing import missing

__getattr__ = missing(__name__)
