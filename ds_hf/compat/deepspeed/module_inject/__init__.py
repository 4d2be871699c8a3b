"""``deepspeed.module_inject``."""

from .autotp_config import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec, merge_autotp_configs
from .layers import LinearAllreduce, LinearLayer, SubParamLinearAllreduce, SubParamLinearLayer, set_autotp_mode
