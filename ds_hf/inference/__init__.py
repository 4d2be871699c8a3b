"""Models that only compute: decoding, ``init_inference``, ZeRO-Inference.

How it works is in docs/design/inference.md.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """What ``deepspeed.inference`` has besides, for ``import ds_hf as deepspeed``."""
    from ds_hf.stand_in import name_of_deepspeed

    return name_of_deepspeed(__name__, name)
