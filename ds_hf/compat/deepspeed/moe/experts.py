"""``deepspeed.moe.experts``."""

from ds_hf.engine.parallel.experts.separate import SeparateExperts as Experts

__all__ = ["Experts"]
