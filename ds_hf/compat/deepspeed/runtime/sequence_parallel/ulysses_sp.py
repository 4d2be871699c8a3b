"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: long sequences for models of transformers."""

from __future__ import annotations

from ds_hf.deepspeed_api.sequence.loader import UlyssesSPDataLoaderAdapter
from ds_hf.deepspeed_api.sequence.ulysses import UlyssesSPAttentionHF

from ..._missing import missing

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
__getattr__ = missing(__name__)
