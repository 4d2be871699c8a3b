"""``deepspeed.inference.engine``: the engine that ``init_inference`` returns."""

from ds_hf.inference.engine import InferenceEngine

__all__ = ["InferenceEngine"]
