"""Workers of pytest-xdist forked from the server of ranks, which has imported torch, transformers and the test modules:
two thirds of what each would compute before its first test, and a rank finds its module there."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import types
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from ds_hf import host
from tests.helpers.collected import ARGUMENTS, MODULE
from tests.helpers.distributed import PRELOAD

__all__ = ["fork_workers"]


def fork_workers(config: Any) -> None:
    """From now on, what execnet starts as an interpreter of its own is forked from the server."""
    from execnet import gateway_io

    if host.has_gpu():  # which a test module may begin while it is imported, and what is forked then could not
        return
    *libraries, last = PRELOAD
    os.environ[ARGUMENTS] = json.dumps(["-m", config.getoption("markexpr"), *config.args])
    forkserver.set_forkserver_preload([*libraries, MODULE, last])
    forkserver.ensure_running()
    del os.environ[ARGUMENTS]

    class Forked(gateway_io.Popen2IO):  # type: ignore[misc,name-defined]
        """``Popen2IOMaster``."""

        def __init__(self, args: list[str], execmodel: Any) -> None:
            context: Any = multiprocessing.get_context("forkserver")
            read, told = context.Pipe(duplex=False)
            said, write = context.Pipe(duplex=False)
            # a daemon: this process does not wait for it at its end
            self._process = context.Process(target=_worker, args=(args[-1], read, write), daemon=True)
            self._process.start()
            super().__init__(_stream(told, "wb"), _stream(said, "rb"), execmodel=execmodel)
            for each in (read, told, said, write):
                each.close()

        def wait(self) -> int | None:
            self._process.join()
            code: int | None = self._process.exitcode
            return code

        def kill(self) -> None:
            self._process.kill()

    gateway_io.Popen2IOMaster = Forked


def _stream(pipe: Connection, mode: str) -> Any:
    return os.fdopen(os.dup(pipe.fileno()), mode)


def _worker(code: str, read: Connection, write: Connection) -> None:
    """What ``python -u -c CODE`` does, with these as its standard input and output."""
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type] # the default, as in an interpreter
    process: Any = multiprocessing.process
    process._parent_process, process.current_process().name = None, "MainProcess"
    process.current_process()._config["daemon"] = False
    for number, pipe in enumerate((read, write)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", 1, closefd=False)
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
