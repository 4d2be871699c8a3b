"""``deepspeed.runtime.zero.muon.muon_optimizer``."""

from ds_hf.engine.optim.muon import MuonWithAuxAdam

from .original_muon import adam_update, muon_update

__all__ = ["MuonWithAuxAdam", "adam_update", "muon_update"]
