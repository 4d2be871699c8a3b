"""How many positions a model has learned, where it has a table of them: no sequence can be longer."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["positions_in", "positions_of"]


def positions_in(config: Any) -> int | None:
    """By a configuration of transformers; ``None`` where positions are computed."""
    limit = getattr(config, "n_positions", None)
    if limit is None and getattr(config, "position_embedding_type", None) == "absolute":
        limit = getattr(config, "max_position_embeddings", None)
    return limit


def positions_of(model: nn.Module) -> int | None:
    """The tokens that ``model`` has learned positions for; ``None`` where there is no table of them."""
    return positions_in(getattr(model, "config", None))
