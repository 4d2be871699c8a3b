"""``python`` for tests, in a forked process that has torch and transformers already: a tenth of a second, not four.

For scripts and commands whose *result* is tested. What tests the start of Python itself (which modules an import loads,
variables that are read while torch is imported, signals, other launchers) starts an interpreter of its own.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.distributed import DistributedFailure, run_distributed

__all__ = ["python", "torchrun"]

LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ended(Exception):
    """A script ended with this exit code."""


def python(
    *words: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run([sys.executable, *words], capture_output=True, text=True)`` returns, far sooner.

    Args:
        words: ``-c CODE``, ``-m MODULE`` or a script, and its arguments.
        env: the whole environment, as of ``subprocess.run``; by default this process's without a launcher's variables.
        cwd: where it runs.
        timeout: seconds on a quiet machine, as of ``run_distributed``.

    Raises:
        DistributedFailure: if it hangs, or dies without Python.
    """
    if env is None:
        env = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    with tempfile.TemporaryDirectory(prefix="ds_hf_test_") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        given = ([os.fspath(word) for word in words], dict(env), cwd and os.fspath(cwd), str(out), str(err))
        (code,) = run_distributed(_run, 1, *given, backend=None, timeout=timeout)
        return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())


def torchrun(
    *words: str | os.PathLike[str],
    world_size: int = 2,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 100.0,
) -> str:
    """What ``torchrun --nproc-per-node WORLD_SIZE`` printed, both streams of all ranks.

    ``env`` is added to this process's. ``run_torchrun`` starts the real one.

    Raises:
        DistributedFailure: with all output, if a rank ends with an error or hangs.
    """
    with tempfile.TemporaryDirectory(prefix="ds_hf_test_") as folder:
        said = Path(folder) / "said"
        given = ([os.fspath(word) for word in words], dict(env or {}), cwd and os.fspath(cwd), str(said))
        try:
            run_distributed(_run_rank, world_size, *given, backend=None, timeout=timeout)
        except DistributedFailure as failure:
            raise DistributedFailure(f"{said.read_text() if said.exists() else ''}\n{failure}") from None
        return said.read_text()


def _run(words: list[str], env: dict[str, str], cwd: str | None, out: str, err: str) -> int:
    os.environ.clear()
    os.environ.update(env)
    return _as_main(words, cwd, out, err)


def _run_rank(words: list[str], env: dict[str, str], cwd: str | None, said: str) -> None:
    os.environ.update(env)
    code = _as_main(words, cwd, said, said)
    if code:
        raise Ended(code)


def _as_main(words: list[str], cwd: str | None, out: str, err: str) -> int:
    """Run it as the interpreter would, and return its exit code; its output is in these files."""
    if cwd is not None:
        os.chdir(cwd)
    kept = os.dup(1), os.dup(2), sys.stdout, sys.stderr
    streams = []
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
        streams.append(os.fdopen(os.dup(number), "w", buffering=1))
    sys.stdout, sys.stderr = streams
    try:
        return _code_of(words)
    finally:
        for stream in streams:
            stream.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        sys.stdout, sys.stderr = kept[2:]


def _code_of(words: list[str]) -> int:
    kind, rest = (words[0], words[1:]) if words[0] in ("-c", "-m") else ("", words)
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else rest
    sys.path.insert(0, str(Path(rest[0]).resolve().parent) if not kind else os.getcwd())
    code = 0
    try:
        if kind == "-c":
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # as at the end of an interpreter: threads, then exit handlers
    atexit._run_exitfuncs()
    return code
