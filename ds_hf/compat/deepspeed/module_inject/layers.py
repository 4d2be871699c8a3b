"""``deepspeed.module_inject.layers``."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.tensor_info import collect_autotp_universal_checkpoint_info
from ds_hf.deepspeed_api.tensor_layers import (
    DS_IS_REPLACED_MODULE,
    DS_TENSOR_MODEL_PARALLEL,
    GateUpPack_LinearLayer,
    LinearAllreduce,
    LinearLayer,
    LmHeadLinearAllreduce,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
    TensorParallel_Layer,
    get_shard_size_list,
)
from ds_hf.deepspeed_api.tensor_parallel import (
    AUTOTP_MODE,
    get_auto_tp_mode,
    is_autotp_training_mode,
    set_autotp_mode,
)
from ds_hf.engine.parallel.tensor.gathered import GatherReplacedLayerParams

from .._missing import missing

__getattr__ = missing(__name__)
