"""``deepspeed.runtime.torch_autocast``."""

from __future__ import annotations

from ds_hf.deepspeed_api.autocast import (
    autocast_if_enabled,
    get_autocast_dtype,
    get_default_autocast_lower_precision_modules,
    init_autocast_params,
    is_autocast_initialized,
    lower_precision_safe_modules,
)
from ds_hf.engine.zero.comm_dtype import (
    COMM_DTYPE as PARAM_COMM_DTYPE_ATTR_NAME,
)
from ds_hf.engine.zero.comm_dtype import (
    get_all_comm_dtypes,
    get_comm_dtype,
    has_comm_dtype,
    sort_dtypes,
)

from .._missing import missing

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "autocast_if_enabled",
    "get_all_comm_dtypes",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "init_autocast_params",
    "is_autocast_initialized",
    "sort_dtypes",
]
LOWER_PRECISION_SAFE_MODULES = lower_precision_safe_modules()
__getattr__ = missing(__name__)
