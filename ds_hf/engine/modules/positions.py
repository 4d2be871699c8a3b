"""How many positions a model has a table of, where it has one: no sequence of text can be longer."""

from __future__ import annotations

from torch import nn

__all__ = ["positions_of"]

# The last part of the name of a table, in transformers' models; those of places on a page and of pixels have others.
_NAMES = {"wpe", "position_embedding", "position_embeddings", "embed_positions", "positions_embed", "pos_emb"}
_OTHERS = ("vision", "visual", "image", "video", "audio")  # what is not text has positions of its own


def positions_of(model: nn.Module) -> int | None:
    """The tokens of text that ``model`` has positions for; ``None`` where they are computed."""
    config, found = getattr(model, "config", None), []
    readers = {"": model}  # modules by name; those that say what they read
    for name, module in model.named_modules():
        if hasattr(module, "main_input_name"):
            readers[name] = module
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _NAMES:
            around = next(readers[part] for part in _upwards(name) if part in readers)
            text = getattr(around, "main_input_name", "input_ids") == "input_ids"
            if text and not any(other in name for other in _OTHERS):
                found.append(module.num_embeddings - _unused(module))
    names = ["n_positions"]  # also where the table is no module
    names += ["max_position_embeddings"] if found else []  # a table may have rows beyond them
    found += [limit for name in names if isinstance(limit := getattr(config, name, None), int)]
    return min(found, default=None)


def _upwards(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _unused(table: nn.Embedding) -> int:
    """Rows before that of the first token: BART and OPT begin at an offset, RoBERTa after the row of padding."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1
