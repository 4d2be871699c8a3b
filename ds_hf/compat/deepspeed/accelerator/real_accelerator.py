"""``deepspeed.accelerator.real_accelerator``: the device of this process."""

from __future__ import annotations

from ds_hf.engine.dist.accelerator import get_accelerator

from .._missing import missing

__all__ = ["get_accelerator"]
__getattr__ = missing(__name__)
