"""Which linear layers of a model may compute in fewer bits than it trains in, and why the others may not.

One answer for those that round while they train and for files in few bits, which are to round the same layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["head_of", "is_router", "layers_of_backbone"]

_ROUTER = re.compile(r"(^|_)(gate|router|wg)$")  # chooses experts: a few columns that decide


def head_of(module: nn.Module) -> nn.Module | None:
    """What a model of transformers says makes its logits."""
    find: Any = getattr(module, "get_output_embeddings", None)
    try:
        return find() if callable(find) else None
    except (AttributeError, NotImplementedError):
        return None


def is_router(name: str) -> bool:
    """Whether the layer of this name chooses experts."""
    return _ROUTER.search(name.rpartition(".")[2]) is not None


def layers_of_backbone(model: nn.Module) -> Iterator[tuple[str, nn.Linear, str]]:
    """Name, layer, and why it stays as it is, ``""`` if it need not, of each linear layer.

    The backbone is transformers' ``base_model``; of other models all layers are in it.
    """
    base = getattr(model, "base_model", model)
    inside = {id(module) for module in (base if isinstance(base, nn.Module) else model).modules()}
    head = head_of(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            outside = id(module) not in inside or module is head
            yield name, module, "the head" if outside else "a router" if is_router(name) else ""
