"""``deepspeed.pipe``: models as pipelines."""

from __future__ import annotations

from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec

from .._missing import missing

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
__getattr__ = missing(__name__)
