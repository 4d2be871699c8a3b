"""Models that compute their loss themselves, whatever the Trainer hands them for it."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["ignores_items"]

_COMPUTED_HERE = ("CrossEntropyLoss", "cross_entropy", "MSELoss")
_HANDED_ON = ("num_items_in_batch", "loss_function")


def ignores_items(model: Any) -> bool:
    """Whether ``model``'s forward takes ``num_items_in_batch`` among its ``**kwargs`` and leaves it unused: its loss is
    a mean over each micro-batch, and transformers' Trainer takes it for a part of a sum over the whole step. BERT, T5,
    BART, Whisper and most classifiers of transformers 5 do so.

    Read from its source; ``False`` where there is none.
    """
    model = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    if getattr(model, "accepts_loss_kwargs", None) is not None:
        return False
    try:
        text = inspect.getsource(type(model).forward)
        kinds = {param.kind for param in inspect.signature(type(model).forward).parameters.values()}
    except (OSError, TypeError, ValueError):
        return False
    computes = any(word in text for word in _COMPUTED_HERE) and not any(word in text for word in _HANDED_ON)
    return computes and inspect.Parameter.VAR_KEYWORD in kinds
