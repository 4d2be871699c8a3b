"""``deepspeed.runtime.config``."""

from __future__ import annotations

from ds_hf.config.deepspeed_view import DeepSpeedConfig
from ds_hf.errors import ConfigError as DeepSpeedConfigError

from .._missing import missing

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "ADAM_W_MODE",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "TORCH_ADAM_PARAM",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
]

# Values of optimizer.type, and two keys of its params.
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"

__getattr__ = missing(__name__)
