"""Words for dtypes, as configurations, files and messages have them; torch is not imported for it."""

from __future__ import annotations

__all__ = ["name_of"]


def name_of(dtype: object) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
