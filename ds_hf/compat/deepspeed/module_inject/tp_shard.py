"""``deepspeed.module_inject.tp_shard``."""

from __future__ import annotations

from .._missing import missing
from .layers import get_shard_size, get_shard_size_list

__getattr__ = missing(__name__)
