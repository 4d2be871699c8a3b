"""States of an optimizer that are one number for a parameter, as the manifest has them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ds_hf.dtypes import name_of

__all__ = ["encode_scalar", "newest", "number"]


def encode_scalar(value: Any) -> Any:
    """``value`` for JSON: tensors become ``[dtype, number]``."""
    return [name_of(value.dtype), value.item()] if isinstance(value, Tensor) else value


def number(value: Any) -> Any:
    """A scalar of a manifest, without its dtype."""
    return value[1] if isinstance(value, list) else value


def newest(values: list[Any]) -> Any:
    """One scalar for a segment whose parameters were saved with several: that of the most steps."""

    def rank_of(value: Any) -> float:
        found = number(value)
        return float(found) if isinstance(found, int | float) and not math.isnan(found) else -math.inf

    return max(values, key=rank_of)
