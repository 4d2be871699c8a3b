"""``deepspeed.runtime.zero.muon``."""

from __future__ import annotations

from ...._missing import missing
from . import muon_optimizer, original_muon

__all__ = ["muon_optimizer", "original_muon"]
__getattr__ = missing(__name__)
