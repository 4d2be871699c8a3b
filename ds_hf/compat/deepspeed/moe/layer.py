"""``deepspeed.moe.layer``."""

from ds_hf.deepspeed_api.moe.gates import TopKGate
from ds_hf.deepspeed_api.moe.layer import MoE, MOELayer
from ds_hf.engine.parallel.experts.separate import SeparateExperts as Experts

__all__ = ["Experts", "MOELayer", "MoE", "TopKGate"]
