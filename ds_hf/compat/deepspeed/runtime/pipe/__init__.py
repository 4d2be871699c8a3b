"""``deepspeed.runtime.pipe``."""

from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from ds_hf.engine.parallel.pipeline.topology import ProcessTopology

from . import dualpipev, engine, module, p2p, schedule, topology

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "dualpipev",
    "engine",
    "module",
    "p2p",
    "schedule",
    "topology",
]
