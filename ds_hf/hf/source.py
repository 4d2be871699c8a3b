"""What ``--deepspeed`` and ``HfDeepSpeedConfig`` may be given, checked, as the plain dict that transformers keeps."""

from __future__ import annotations

import copy
from typing import Any

from ds_hf.config import Config, load_config
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = ["AUTO", "PROVISIONAL", "checked_config", "plain_config"]

AUTO = "auto"
# What "auto" stands for until the model is known: sharded optimizer states suit every model, and no model has to be
# built under zero.Init for them.
PROVISIONAL = "zero1"
OFFLOAD_PARAM = "/zero_optimization/offload_param"
ZERO_KEYS_OF_ACCELERATE = {
    "stage",
    "offload_optimizer",
    "offload_param",
    "stage3_gather_16bit_weights_on_model_save",
}


def checked_config(source: Any) -> Config:
    """Read and check ``source``; "auto" values stay, because the Trainer fills them later.

    Raises:
        ConfigError: with every fault found.
    """
    return load_config(PROVISIONAL if source == AUTO else source, allow_auto=True, check_batch=False)


def plain_config(source: Any) -> dict[str, Any]:
    """``source``, checked, as a dict of its own: comments gone, presets spelt out, old names replaced."""
    try:
        config = checked_config(source)
    except ConfigError as error:
        if [fault.pointer for fault in error.faults] != [OFFLOAD_PARAM] or not _asked_by_accelerate(source):
            raise
        # ``accelerate config`` asks it at stage 2 as well, where the answer changes nothing in DeepSpeed.
        warn_once(f"offload_param_device is dropped: {error.faults[0].message}; parameters stay on the device")
        zero = {key: value for key, value in source["zero_optimization"].items() if key != "offload_param"}
        config = checked_config({**source, "zero_optimization": zero})
    return copy.deepcopy(config.resolved)


def _asked_by_accelerate(source: Any) -> bool:
    """Whether accelerate wrote this dict, from its questionnaire, its launch flags or a plugin's arguments."""
    zero = source.get("zero_optimization") if isinstance(source, dict) else None
    if not isinstance(zero, dict) or zero.keys() != ZERO_KEYS_OF_ACCELERATE:
        return False
    return all(zero[name].keys() == {"device", "nvme_path"} for name in ("offload_optimizer", "offload_param"))
