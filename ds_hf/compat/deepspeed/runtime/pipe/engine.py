"""``deepspeed.runtime.pipe.engine``."""

from ds_hf.deepspeed_api.pipeline import PipelineEngine, PipelineModule
from ds_hf.engine.parallel.data import RepeatingLoader
from ds_hf.errors import PipelineError

from ..utils import PartitionedTensor
from . import p2p, schedule

__all__ = [
    "PartitionedTensor",
    "PipelineEngine",
    "PipelineError",
    "PipelineModule",
    "RepeatingLoader",
    "p2p",
    "schedule",
]
