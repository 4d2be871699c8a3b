"""``deepspeed.runtime.tensor_parallel.config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hf.config.load import load_config
from ds_hf.config.types.parallel import TensorParallelSection as TPTrainingConfig
from ds_hf.config.types.parallel import TPGroupSection as TPConfig
from ds_hf.deepspeed_api.tensor_parallel import AUTOTP_MODE as AUTOTP_MODE


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TPTrainingConfig:
    """The section of a configuration."""
    given = {"train_batch_size": 1, "tensor_parallel": dict(ds_config.get("tensor_parallel", {}))}
    return load_config(given, check_batch=False).tensor_parallel
