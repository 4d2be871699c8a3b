"""``deepspeed.inference``: models that only compute. FastGen (``inference.v2``) is not here."""

from __future__ import annotations

from . import config, engine
from .config import DeepSpeedInferenceConfig
from .engine import InferenceEngine

from .._missing import missing

__all__ = ["DeepSpeedInferenceConfig", "InferenceEngine", "config", "engine"]
__getattr__ = missing(__name__)
