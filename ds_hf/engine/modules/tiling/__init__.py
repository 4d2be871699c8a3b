"""Functions and losses computed tile by tile along the sequence, and where models have them."""

from __future__ import annotations

from ds_hf.engine.modules.tiling.models import attach

__all__ = ["attach"]
