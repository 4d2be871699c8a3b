"""``deepspeed.utils.torch``."""

from __future__ import annotations

from ds_hf.deepspeed_api.runtime_utils import required_torch_version

from .._missing import missing

__all__ = ["required_torch_version"]
__getattr__ = missing(__name__)
