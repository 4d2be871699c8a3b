"""Python's collector of cycles, off while engines want it so: ``disable_python_gc``.

It runs when a count of objects says so, at another moment on each rank, and all ranks wait for the one that pauses. A
script that switches it off calls ``engine.collect_python_gc()`` where a pause costs nothing, on all ranks alike.
Invariant: it is on again when the last such engine is destroyed, if it was before the first; and in forked processes.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

from ds_hf.engine.events import Observer

__all__ = ["attach"]

_lock = threading.Lock()
_engines = 0
_was_on = False


class _Off(Observer):
    """Switches collection on again when its engine is destroyed."""

    def __init__(self, engine: Any) -> None:
        self._over = weakref.finalize(engine, _release, os.getpid())

    def close(self) -> None:
        self._over()


def attach(engine: Any) -> None:
    """Collect, and switch automatic collection off until ``engine`` is destroyed, or gone."""
    global _engines, _was_on
    with _lock:
        if not _engines:
            _was_on = gc.isenabled()
            gc.collect()
            gc.disable()
        _engines += 1
    engine.events.add(_Off(engine))


def _release(pid: int) -> None:
    global _engines
    if pid != os.getpid():
        return
    with _lock:
        _engines -= 1
        if not _engines and _was_on:
            gc.enable()


def _in_child() -> None:
    """A worker of a data loader: it never had an engine."""
    global _lock, _engines
    _lock = threading.Lock()
    if _engines and _was_on:
        gc.enable()
    _engines = 0


os.register_at_fork(after_in_child=_in_child)
