"""``deepspeed.compression.basic_layer``."""

from ds_hf.compression.layers import (
    BNLayer_Compress,
    ColumnParallelLinear_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    QuantAct,
    RowParallelLinear_Compress,
)

__all__ = [
    "BNLayer_Compress",
    "ColumnParallelLinear_Compress",
    "Conv2dLayer_Compress",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "QuantAct",
    "RowParallelLinear_Compress",
]
