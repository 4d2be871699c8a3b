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

__all__ = ["switch_off_for"]

_lock = threading.Lock()
_engines = 0
_was_on = False


def switch_off_for(engine: Any) -> weakref.finalize[Any, Any]:
    """Collect, and switch automatic collection off until what is returned is called, or ``engine`` is gone."""
    global _engines, _was_on
    with _lock:
        if not _engines:
            _was_on = gc.isenabled()
            gc.collect()
            gc.disable()
        _engines += 1
    return weakref.finalize(engine, _release, os.getpid())


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
