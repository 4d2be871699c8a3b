"""``deepspeed.zero``: construction of sharded models and access to their parameters."""

from ds_hf.engine.zero.init import ZeroParamStatus
from ds_hf.engine.zero.external import register_external_parameter, unregister_external_parameter
from ds_hf.engine.zero.gather import GatheredParameters, unwrap_model_for_generation
from ds_hf.engine.zero.init import Init

from . import (
    config,
    leaf_module_config,
    muon,
    offload_config,
    offload_states,
    partition_parameters,
    stage3,
    stage_1_and_2,
    tiling,
    utils,
)
from .tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "config",
    "leaf_module_config",
    "muon",
    "offload_config",
    "offload_states",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "utils",
]
