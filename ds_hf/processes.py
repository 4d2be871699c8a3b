"""Programs that a command starts, which end when it does, whatever ends it.

Ctrl-C, SIGTERM and SIGHUP take one way through a command: ``KeyboardInterrupt``, on which it ends what it has started.
Where it is killed, the system sends SIGTERM to the program, and torchrun's agent then ends its workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

__all__ = ["end_program", "signals_interrupt", "start_program"]

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0


def start_program(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A program in a session of its own, so that a terminal's Ctrl-C reaches the command alone.

    Args:
        options: of ``subprocess.Popen``.

    Raises:
        OSError: it cannot be started.
    """
    alone = threading.current_thread() is threading.main_thread()  # the signal comes when the thread ends
    before = partial(_end_with, os.getpid(), _prctl()) if alone else None
    return subprocess.Popen(words, start_new_session=True, preexec_fn=before, **options)


def _prctl() -> Any:
    with suppress(OSError, AttributeError):
        return ctypes.CDLL(None).prctl
    return None


def _end_with(parent: int, prctl: Any) -> None:
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # gone before we asked
            os._exit(1)


def end_program(process: subprocess.Popen[Any], grace_s: float = GRACE_S) -> None:
    """End a launcher and all that it started: torchrun gives each of its workers a session of its own."""
    import psutil  # not at the start of every command

    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    for each in family:
        with suppress(psutil.Error):
            each.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP are Ctrl-C inside, once: further ones do not cut short what ends the work. A signal that is
    ignored (``nohup``) stays so.

    Raises:
        SystemExit: 128 + signal at the end, where one came.
    """
    received: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signum)
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if main else ()
    before = {signum: signal.getsignal(signum) for signum in numbers}
    taken = [signum for signum, handler in before.items() if handler == signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)
        if received:
            raise SystemExit(128 + received[0])
