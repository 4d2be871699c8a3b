"""What ds_hf adds to transformers and accelerate: hooks that check ``--deepspeed`` early, CPU processes, ``auto``.

How it works is in docs/design/names.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hf.hf.lr_finder import LrFinderCallback

__all__ = ["LrFinderCallback"]


def __getattr__(name: str) -> Any:
    """Importing this package does no work, and never imports transformers."""
    if name != "LrFinderCallback":
        raise AttributeError(f"module 'ds_hf.hf' has no attribute {name!r}")
    from ds_hf.hf.lr_finder import LrFinderCallback

    return LrFinderCallback
