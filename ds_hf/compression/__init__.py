"""Compression during training: quantized weights and activations, pruning, students of fewer layers, and the end that
makes a model really smaller. ``compression_training`` of the file, and DeepSpeed's names for it.

What to take when is in docs/compression.md, how it works in docs/design/compression.md.
"""

from __future__ import annotations

from typing import Any

from ds_hf.compression.clean import redundancy_clean
from ds_hf.compression.compress import init_compression
from ds_hf.compression.schedule import compression_scheduler
from ds_hf.compression.students import student_initialization

__all__ = ["compression_scheduler", "init_compression", "redundancy_clean", "student_initialization"]


def __getattr__(name: str) -> Any:
    """What ``deepspeed.compression`` has besides, for ``import ds_hf as deepspeed``."""
    from ds_hf.stand_in import name_of_deepspeed

    return name_of_deepspeed(__name__, name)
