"""``deepspeed.runtime.swap_tensor``."""

__all__ = ["MIN_SWAPPABLE_BYTES"]

MIN_SWAPPABLE_BYTES = 1 << 20  # ds_hf writes blocks of any size to files; DeepSpeed's scripts size models by it
