"""``deepspeed.moe.sharded_moe``: gates, and the layer without a residual."""

from ds_hf.deepspeed_api.moe.gates import (
    TopKGate,
    gumbel_rsample,
    multiplicative_jitter,
    top1gating,
    top2gating,
    topkgating,
)
from ds_hf.deepspeed_api.moe.layer import MOELayer

__all__ = [
    "MOELayer",
    "TopKGate",
    "gumbel_rsample",
    "multiplicative_jitter",
    "top1gating",
    "top2gating",
    "topkgating",
]
