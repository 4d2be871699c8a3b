"""``deepspeed.runtime.config``."""

from __future__ import annotations

from ds_hf.config.deepspeed_view import DeepSpeedConfig
from ds_hf.errors import ConfigError as DeepSpeedConfigError

from .._missing import missing

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
__getattr__ = missing(__name__)
