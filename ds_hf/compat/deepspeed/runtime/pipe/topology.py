"""``deepspeed.runtime.pipe.topology``."""

from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid
from ds_hf.engine.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from ds_hf.engine.parallel.pipeline.topology import prime_factors as _prime_factors

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "_prime_factors",
]
