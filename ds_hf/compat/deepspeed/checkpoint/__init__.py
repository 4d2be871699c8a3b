"""``deepspeed.checkpoint``."""

from ds_hf.deepspeed_api.checkpoint.constants import *  # noqa: F403
from ds_hf.deepspeed_api.checkpoint.constants import __all__ as _constants
from ds_hf.checkpoint.deepspeed.layout import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

from . import constants, utils
from .deepspeed_checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint
from .reshape_utils import (
    get_model_3d_descriptor,
    merge_state,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from .universal_checkpoint import SubparamShape, enable_universal_checkpoint

__all__ = [
    "DeepSpeedCheckpoint",
    "SubparamShape",
    "ZeROCheckpoint",
    "constants",
    "enable_universal_checkpoint",
    "get_layer_ckpt_name_for_rank",
    "get_model_3d_descriptor",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "merge_state",
    "model_3d_desc",
    "reshape_meg_2d_parallel",
    "utils",
    *_constants,
]
