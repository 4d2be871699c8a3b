"""``deepspeed.runtime.zero.utils``."""

from __future__ import annotations

from typing import Any

import torch

from ds_hf.errors import DsHfError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]


def is_zero_param(parameter: Any) -> bool:
    """Whether it is a parameter of stage 3, sharded or small and kept whole."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether ZeRO takes this optimizer: any of torch's kind."""
    return isinstance(optimizer, torch.optim.Optimizer)
