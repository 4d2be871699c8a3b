"""``deepspeed.inference.engine``: the engine that ``init_inference`` returns."""

from __future__ import annotations

from ds_hf.inference.engine import InferenceEngine

from .._missing import missing

__all__ = ["InferenceEngine"]
__getattr__ = missing(__name__)
