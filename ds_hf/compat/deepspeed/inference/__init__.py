"""``deepspeed.inference``: models that only compute. FastGen (``inference.v2``) is not here."""

from . import config, engine
from .config import DeepSpeedInferenceConfig
from .engine import InferenceEngine

__all__ = ["DeepSpeedInferenceConfig", "InferenceEngine", "config", "engine"]
