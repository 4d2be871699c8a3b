"""``deepspeed.runtime.zero.tiling``."""

from __future__ import annotations

from ds_hf.deepspeed_api.tiling import TiledLinear, TiledLinearReturnBias

from ..._missing import missing

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
__getattr__ = missing(__name__)
