"""Sequence parallelism: several processes share each sequence (Ulysses, arXiv 2309.14509).

Every process holds a part of the tokens of a sequence, and in attention all of its tokens for a part of the heads. What
is here knows tensors and axes; ``deepspeed_api.sequence`` makes DeepSpeed's names and transformers' attention of it.
"""
