"""``deepspeed.runtime.zero.muon.muon_optimizer``."""

from __future__ import annotations

from ds_hf.engine.optim.muon import MuonWithAuxAdam
from ds_hf.deepspeed_api.muon import adam_update, muon_update

from ...._missing import missing

__all__ = ["MuonWithAuxAdam", "adam_update", "muon_update"]
__getattr__ = missing(__name__)
