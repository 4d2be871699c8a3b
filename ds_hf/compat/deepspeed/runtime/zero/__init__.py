"""``deepspeed.zero``: construction of sharded models and access to their parameters."""

from __future__ import annotations

from ds_hf.engine.zero.external import register_external_parameter
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init

from ..._missing import missing
from . import partition_parameters

__all__ = ["GatheredParameters", "Init", "partition_parameters", "register_external_parameter"]
__getattr__ = missing(__name__)
