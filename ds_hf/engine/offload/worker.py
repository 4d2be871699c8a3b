"""One thread that updates states on the CPU while the main thread launches copies and collectives.

It is bound to the rank's share of the cores, and with it the OpenMP threads that its kernels start, most of them
(``cpu.beside_threads``) whatever OMP_NUM_THREADS=1 leaves the rest of the process. ctypes and torch
release the GIL for the length of a kernel. Tasks run one after another in the order they were given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from ds_hf.engine.ops.cpu import beside_threads, use_threads
from ds_hf.host import rank_cores

__all__ = ["Worker"]

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """The thread starts with the first task.

    Attributes:
        threads: how many its kernels use.
    """

    def __init__(self) -> None:
        self.threads = beside_threads()
        self._pool = ThreadPoolExecutor(1, "ds_hf-offload", _bind, (self.threads,))

    def submit(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``task`` without autograd. Its exception is raised by ``Future.result``."""
        return self._pool.submit(_without_autograd, partial(task, *args, **kwargs))

    def close(self) -> None:
        """Forget what has not begun, and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _without_autograd(task: Callable[[], T]) -> T:
    with torch.no_grad():
        return task()


def _bind(threads: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a sandbox that forbids it
            os.sched_setaffinity(0, rank_cores())
    use_threads(threads)
