"""``deepspeed.runtime.zero.muon``."""

from . import muon_optimizer, original_muon

__all__ = ["muon_optimizer", "original_muon"]
