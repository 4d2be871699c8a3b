"""``deepspeed.module_inject.tp_shard``."""

from __future__ import annotations

from ds_hf.deepspeed_api.tensor_layers import get_shard_size, get_shard_size_list

from .._missing import missing

__getattr__ = missing(__name__)
