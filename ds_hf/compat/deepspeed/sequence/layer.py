"""``deepspeed.sequence.layer``."""

from ds_hf.deepspeed_api.sequence.layer import DistributedAttention, apply_rotary_pos_emb, single_all_to_all
from ds_hf.deepspeed_api.sequence.layer import SeqAllToAll as _SeqAllToAll

__all__ = ["DistributedAttention", "_SeqAllToAll", "apply_rotary_pos_emb", "single_all_to_all"]
