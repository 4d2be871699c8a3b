"""``deepspeed.runtime.base_optimizer``: classes that ``isinstance`` asks for."""

from __future__ import annotations

from ds_hf.deepspeed_api.optimizer_kinds import DeepSpeedOptimizer, ZeROOptimizer

from .._missing import missing

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
__getattr__ = missing(__name__)
