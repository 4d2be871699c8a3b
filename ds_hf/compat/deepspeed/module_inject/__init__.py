"""``deepspeed.module_inject``."""

from __future__ import annotations

from ds_hf.deepspeed_api.tensor_layers import (
    LinearAllreduce,
    LinearLayer,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
)
from ds_hf.deepspeed_api.tensor_parallel import set_autotp_mode
from ds_hf.deepspeed_api.tensor_rules import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)

from .._missing import missing

__getattr__ = missing(__name__)
