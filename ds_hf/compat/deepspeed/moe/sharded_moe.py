"""``deepspeed.moe.sharded_moe``: gates, the layer without a residual, and the library by which gates agree."""

import torch.distributed as dist

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
    "dist",
    "gumbel_rsample",
    "multiplicative_jitter",
    "top1gating",
    "top2gating",
    "topkgating",
]
