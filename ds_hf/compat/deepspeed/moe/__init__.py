"""``deepspeed.moe``: DeepSpeed's layer of experts, and what scripts ask of models that may have some."""

from . import experts, layer, sharded_moe, utils

__all__ = ["experts", "layer", "sharded_moe", "utils"]
