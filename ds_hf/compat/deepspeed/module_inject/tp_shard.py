"""``deepspeed.module_inject.tp_shard``."""

from .layers import get_shard_size, get_shard_size_list
