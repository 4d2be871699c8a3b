"""``deepspeed.module_inject.autotp_config``."""

from __future__ import annotations

from ds_hf.deepspeed_api.tensor_rules import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)

from .._missing import missing

__getattr__ = missing(__name__)
