"""Pipelines as DeepSpeed's users know them."""

from __future__ import annotations

from ds_hf.deepspeed_api.pipeline.engine import PipelineEngine
from ds_hf.deepspeed_api.pipeline.module import DualPipeVModule, PipelineModule

__all__ = ["DualPipeVModule", "PipelineEngine", "PipelineModule"]
