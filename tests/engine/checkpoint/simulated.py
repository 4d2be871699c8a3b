"""Ranks as threads of one process, so that a case costs a tenth of a second and not processes.

Collectives are torch's own functions over torch's threaded process group. What a process has only one of (random
state, environment) is shared: models are built before the ranks start, from a generator of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import multi_threaded_pg

from ds_hf.engine.comm import mesh
from ds_hf.engine.comm.mesh import Axis

__all__ = ["run_threads"]


def _axis(*_: Any, **__: Any) -> Axis:
    """The axis of all threads, without the board and the watch, which count on one rank a process."""
    return Axis(None, dist.get_rank(), dist.get_world_size())


@contextlib.contextmanager
def _threaded_groups() -> Iterator[None]:
    assert not dist.is_initialized()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it here
        multi_threaded_pg.ThreadLocalWorld.comms = []
    multi_threaded_pg._install_threaded_pg()
    try:
        with mock.patch.object(mesh, "axis_of", _axis):
            yield
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()  # what a failed run left
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def run_threads(calls: list[Callable[[], Any]], timeout: float = 600.0) -> list[Any]:
    """Run one call a rank, with ``len(calls)`` ranks, and return the results by rank.

    Raises:
        Exception: the first failure that is not the echo of another rank's.
    """
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def body(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=len(calls), store=store)
            try:
                results[rank] = calls[rank]()
            finally:
                dist.destroy_process_group()
        except BaseException as failure:
            failures.append(failure)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(failure)  # the others stop waiting

    with _threaded_groups():
        store = HashStore()
        threads = [threading.Thread(target=body, args=(rank, store), daemon=True) for rank in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        stuck = [thread.name for thread in threads if thread.is_alive()]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, SystemExit)):  # exits are echoes
        raise failure
    assert not stuck, f"{stuck} did not come to an end"
    return results
