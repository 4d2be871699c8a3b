"""``deepspeed.runtime.pipe.module``."""

from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from ds_hf.engine.parallel.pipeline.topology import PipeDataParallelTopology
from ds_hf.errors import PipelineError

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipelineError",
    "PipelineModule",
    "PipelineParallelGrid",
    "TiedLayerSpec",
]
