"""``start_program`` for tests: the program runs in a forked process that has torch already, as ``interpreter.python``.

For what a command does *beside* a script that it has started. How real programs and launchers start and end is tested
by ``tests/test_processes.py``, ``tests/launcher`` and one real launch of each command.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.distributed import PRELOAD, _end_with_parent, free_port
from tests.helpers.interpreter import _as_main

__all__ = ["ForkedProgram"]

_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


class ForkedProgram:
    """What ``subprocess.Popen`` is to a command; ``torchrun`` of one process is the script with its variables."""

    def __init__(
        self, words: Sequence[str], *, stdout: Any, env: Mapping[str, str], cwd: Path | None = None, **_: Any
    ) -> None:
        assert words[0] == sys.executable, words
        words, env = list(words[1:]), dict(env)
        if words[: len(_TORCHRUN)] == _TORCHRUN:
            words = words[len(_TORCHRUN) :]
            env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe(duplex=True)
        given = (words, env, str(cwd or Path.cwd()), getattr(stdout, "name", os.devnull), list(sys.path), theirs)
        self._process = context.Process(target=_program, args=given)
        self._process.start()
        theirs.close()
        self.pid = int(self._process.pid)

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("forked program", timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _program(words: list[str], env: dict[str, str], cwd: str, said: str, path: list[str], pipe: Connection) -> None:
    os.setsid()
    gc.freeze()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(env)
    os._exit(_as_main(words, cwd, said, said))
