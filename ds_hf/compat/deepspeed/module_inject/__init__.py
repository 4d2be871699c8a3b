"""``deepspeed.module_inject``."""

from __future__ import annotations

from .._missing import missing
from .autotp_config import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec, merge_autotp_configs
from .layers import LinearAllreduce, LinearLayer, SubParamLinearAllreduce, SubParamLinearLayer, set_autotp_mode

__getattr__ = missing(__name__)
