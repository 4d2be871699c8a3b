"""One server, from which ranks are forked, for all workers of pytest-xdist: its imports take five seconds of CPU."""

from __future__ import annotations

import os
from multiprocessing import forkserver
from typing import Any

from tests.helpers.distributed import PRELOAD, _begins_cuda

__all__ = ["offer", "take"]

_PLACE = ("_forkserver_address", "_forkserver_authkey")  # the second since Python 3.14


def offer() -> dict[str, Any]:
    """Start the server in the process that has the workers, and return where it is; it ends with this process."""
    if _begins_cuda():
        return {}
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return {name: getattr(_server(), name) for name in _PLACE if hasattr(_server(), name)}


def take(place: dict[str, Any]) -> None:
    """Ranks that this worker starts are forked from the server there."""
    if not place:
        return
    server = _server()
    vars(server).update(place)
    # Each fork is given one end of what keeps its server alive; for this one the process with the workers does that.
    server._forkserver_alive_fd = os.pipe()[1]
    server.ensure_running = lambda: None  # not a child of this process, so it cannot be asked whether it lives


def _server() -> Any:
    return forkserver._forkserver  # type: ignore[attr-defined]
