"""``deepspeed.runtime.pipe.dualpipev``."""

from ds_hf.deepspeed_api.pipeline import DualPipeVModule
from ds_hf.deepspeed_api.pipeline import PipelineEngine as DualPipeVEngine

__all__ = ["DualPipeVEngine", "DualPipeVModule"]
