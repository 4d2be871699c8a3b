"""A rehearsal of a training script: ``initialize`` gives the engine's place to something that only looks.

``ds-hf memory train.py`` runs the script until it would train, to learn its model, configuration and first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["rehearsal", "rehearsing"]

StandIn = Callable[..., tuple[Any, Any, Any, Any]]
_stand_in: ContextVar[StandIn | None] = ContextVar("ds_hf_rehearsal", default=None)


@contextmanager
def rehearsing(stand_in: StandIn) -> Iterator[None]:
    """Inside, ``initialize`` calls ``stand_in`` with ``initialize``'s keyword arguments and returns what it returns."""
    token = _stand_in.set(stand_in)
    try:
        yield
    finally:
        _stand_in.reset(token)


def rehearsal() -> StandIn | None:
    """What is called in ``initialize``'s place now, ``None`` in ordinary runs."""
    return _stand_in.get()
