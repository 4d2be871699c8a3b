"""Hands the commands ``deepspeed``, ``ds`` and ``ds_report`` over to a real DeepSpeed, where one is installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ds_hf.stand_in import beside_real, real_deepspeed

__all__ = ["call_real", "real_deepspeed"]


def call_real(module: str, function: str) -> Any:
    """Call what DeepSpeed's own console script calls, which reads ``sys.argv``; and say so."""
    sys.stderr.write(f"ds_hf: {beside_real()}\n")
    return getattr(importlib.import_module(module), function)()
