"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: long sequences for models of transformers."""

from __future__ import annotations

from ds_hf.deepspeed_api.sequence.loader import UlyssesSPDataLoaderAdapter
from ds_hf.deepspeed_api.sequence.ulysses import UlyssesSPAttentionHF
from ds_hf.deepspeed_api.tiled_compute import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)

from ..._missing import missing

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]
__getattr__ = missing(__name__)
