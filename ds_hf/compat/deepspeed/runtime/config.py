"""``deepspeed.runtime.config``."""

from __future__ import annotations

from ds_hf.deepspeed_api.config import DeepSpeedConfig, get_bfloat16_config, get_float16_config
from ds_hf.deepspeed_api.sparse_attention import get_sparse_attention
from ds_hf.errors import ConfigError as DeepSpeedConfigError

from .._missing import missing

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "ADAM_W_MODE",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUADAMW_OPTIMIZER",
    "MUADAM_OPTIMIZER",
    "MUON_OPTIMIZER",
    "MUSGD_OPTIMIZER",
    "TORCH_ADAM_PARAM",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "get_bfloat16_config",
    "get_float16_config",
    "get_sparse_attention",
]

# Values of optimizer.type, and two keys of its params.
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUON_OPTIMIZER = "muon"
MUSGD_OPTIMIZER = "musgd"
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"

__getattr__ = missing(__name__)
