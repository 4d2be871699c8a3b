"""``deepspeed.runtime.config``."""

from __future__ import annotations

from typing import Any

from ds_hf.deepspeed_api.config import DeepSpeedConfig, get_bfloat16_config, get_float16_config
from ds_hf.engine.modules.sparse.choice import KEYS
from ds_hf.errors import ConfigError as DeepSpeedConfigError

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


def get_sparse_attention(param_dict: dict[str, Any]) -> dict[str, Any] | None:
    """``sparse_attention`` of a configuration file: the mode and the values that it reads; None without the section.

    Raises:
        ValueError: there is no such mode.
    """
    from ds_hf.config.types.training import SparseAttentionSection

    if "sparse_attention" not in param_dict:
        return None
    given = param_dict["sparse_attention"]
    mode = given.get("mode", SparseAttentionSection.mode)
    if mode not in KEYS:
        raise ValueError(f"sparse_attention.mode is one of {', '.join(KEYS)}, not {mode!r}")
    defaults = SparseAttentionSection()
    names = ("block", *KEYS[mode])
    chosen = {name: given.get(name, getattr(defaults, name)) for name in names}
    return {"mode": mode, **{name: list(v) if isinstance(v, tuple) else v for name, v in chosen.items()}}
