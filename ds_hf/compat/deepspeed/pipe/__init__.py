"""``deepspeed.pipe``: models as pipelines."""

from ds_hf.deepspeed_api.pipeline import DualPipeVModule, PipelineModule
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]
