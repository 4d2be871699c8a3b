"""Whether a model's forward wants a keyword that DeepSpeed gives to models which know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["takes"]


def takes(forward: Callable[..., Any], name: str) -> bool:
    """Whether it has a parameter of this name, or takes ``**kwargs`` and reads the name from them.

    DeepSpeed hands the keyword to every model; one of transformers would pass it on to whatever takes ``**kwargs``.
    """
    parameters = inspect.signature(forward).parameters
    if name in parameters:
        return True
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and name in code.co_consts and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
