"""``deepspeed.runtime.zero.muon.original_muon``.

Every process updates all matrices, so the classes for one device and for several are the same here.
"""

from __future__ import annotations

from ds_hf.engine.optim.muon import Muon, MuonWithAuxAdam
from ds_hf.engine.optim.muon import Muon as SingleDeviceMuon
from ds_hf.engine.optim.muon import MuonWithAuxAdam as SingleDeviceMuonWithAuxAdam
from ds_hf.deepspeed_api.muon import adam_update, muon_update
from ds_hf.engine.optim.newton_schulz import (
    NS_METHODS,
    ns_compute_dtype,
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)

from ...._missing import missing

__all__ = [
    "NS_METHODS",
    "Muon",
    "MuonWithAuxAdam",
    "SingleDeviceMuon",
    "SingleDeviceMuonWithAuxAdam",
    "adam_update",
    "muon_update",
    "ns_compute_dtype",
    "zeropower_via_gram_newtonschulz",
    "zeropower_via_newtonschulz5",
]
__getattr__ = missing(__name__)
