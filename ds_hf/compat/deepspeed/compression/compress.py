"""``deepspeed.compression.compress``."""

from ds_hf.compression import init_compression, redundancy_clean, student_initialization

__all__ = ["init_compression", "redundancy_clean", "student_initialization"]
