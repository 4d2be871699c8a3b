"""Checkpoints on disk, of any library: reading, checking and writing their files. It knows no engine.

``formats.open_source`` opens any of them as a ``source.Source``; ``trust`` looks at pickles before they are loaded,
``deepspeed`` reads and writes DeepSpeed's layouts. What a running engine saves and restores is ``engine.checkpoint``.
How it works is in docs/design/checkpoint.md.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """What ``deepspeed.checkpoint`` has besides, for ``import ds_hf as deepspeed``."""
    from ds_hf.stand_in import name_of_deepspeed

    return name_of_deepspeed(__name__, name)
