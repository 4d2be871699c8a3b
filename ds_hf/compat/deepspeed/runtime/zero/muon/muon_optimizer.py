"""``deepspeed.runtime.zero.muon.muon_optimizer``."""

from __future__ import annotations

from ds_hf.engine.optim.muon import MuonWithAuxAdam

from ...._missing import missing
from .original_muon import adam_update, muon_update

__all__ = ["MuonWithAuxAdam", "adam_update", "muon_update"]
__getattr__ = missing(__name__)
