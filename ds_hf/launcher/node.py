"""One host's part of a run: ``python -m ds_hf.launcher.node --node_rank=K WORD``, started by ssh, pdsh, mpirun or srun.

On a single host the front calls ``run_node`` in its own process. Prepares environment and folder, runs the workers
under torch's agent, and leaves none behind: when the connection to the launching host goes (its end of standard output,
or of standard input with ``--stdin_leash``), on a signal, when another host fails or is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.failure import Failure, describe, exit_code, first_of
from ds_hf.launcher.ports import free_port
from ds_hf.launcher.spec import GRACE_ENV, NodeSpec, decode
from ds_hf.log import complain

if TYPE_CHECKING:
    from ds_hf.launcher.agent import Attempt
    from ds_hf.launcher.leash import Leash

__all__ = ["check_can_start", "main", "run_node"]

MARK = "DS_HF_LAUNCH_RUN"  # in the environment of every process of a run: what is swept at the end
HARD_END_S = 12.0
PORTS = 3  # tried one after another where any will do
# mpirun's and srun's own, which would make MPI or a nested srun in a worker believe that it is a rank of theirs.
_LAUNCHER_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "ORTE_", "PRTE_", "HYDRA_", "MPI_LOCAL", "PALS_", "MPIR_")


def main(arguments: list[str] | None = None) -> int:
    """Entry point on a remote host."""
    parser = argparse.ArgumentParser(prog="ds_hf.launcher.node")
    parser.add_argument("--node_rank", required=True, help="index of this host, or `slurm` to look it up")
    parser.add_argument("--run", help="id of the run, to recognise it in the process table")
    parser.add_argument("--stdin_leash", action="store_true")
    parser.add_argument("word")
    options = parser.parse_args(arguments)
    try:
        spec = decode(options.word)
        node = _node_rank(options.node_rank, spec)
        if options.stdin_leash:
            leash_fd = os.dup(0)
            os.set_inheritable(leash_fd, False)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            threading.Thread(target=_watch_input, args=(leash_fd,), daemon=True).start()
        threading.Thread(target=_watch_output, daemon=True).start()
        if spec.cwd is not None and os.path.isdir(spec.cwd):
            os.chdir(spec.cwd)
        check_can_start(spec)
        return run_node(spec, node)
    except LaunchError as error:
        complain(str(error))
        return 1


def check_can_start(spec: NodeSpec) -> None:
    """Refuse what every process would fail at.

    Raises:
        LaunchError: there is no such script or program, or the folder for logs cannot be written to.
    """
    name, here = spec.command[0], os.getcwd()
    if spec.no_python:
        if shutil.which(name) is None:
            raise LaunchError(f"there is no program {name} to execute (in {here})\n  fix: its path, or install it")
    elif spec.module:
        top = name.partition(".")[0]
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, [here, *sys.path]) is None:
            raise LaunchError(f"there is no module {top} (in {here}, or installed)\n  fix: its name, or install it")
    elif not os.path.exists(name):
        raise LaunchError(f"there is no script {name} in {here}\n  fix: its path; options come before the script")
    elif os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
        raise LaunchError(f"{name} is a folder, not a script\n  fix: the path of the script")
    if spec.log_dir is not None:
        try:
            os.makedirs(spec.log_dir, exist_ok=True)
            with tempfile.TemporaryFile(dir=spec.log_dir):
                pass
        except OSError as error:
            raise LaunchError(
                f"--enable_each_rank_log: cannot write into {spec.log_dir}: {error.strerror}"
                "\n  fix: a folder that can be written to"
            ) from None


def run_node(spec: NodeSpec, node: int) -> int:
    """Run the workers of host number ``node``; returns the exit code of the whole run."""
    _prepare(spec, node)
    from ds_hf.launcher.agent import SignalException

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SignalException(f"signal {signum}", signal.Signals(signum))

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), stop)
    with _pid_file(spec):
        try:
            code = _alone(spec, node) if len(spec.hosts) == 1 or spec.min_nodes else _together(spec, node)
        except SignalException as error:
            code = 128 + int(error.sigval)
        finally:
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                signal.signal(getattr(signal, name), signal.SIG_IGN)  # the rest is quick, and must not be cut short
    if code != 0:
        _sweep(spec, node)
    return code


def _alone(spec: NodeSpec, node: int) -> int:
    """One host (or one of an elastic run, whose restarts torch does itself)."""
    from ds_hf.launcher.agent import Attempt

    codes: list[int] = []

    def tell(failures: list[Failure]) -> None:
        codes.append(exit_code(first_of(failures).code))
        left = len(codes) <= spec.max_restarts
        again = f"\nstarting again, attempt {len(codes)} of {spec.max_restarts}" if left else ""
        complain(describe(failures) + again)

    attempt = Attempt(spec, node, 0, spec.master_port)
    while not _run_at_a_port(attempt, tell):
        if spec.min_nodes or attempt.number >= spec.max_restarts:
            return (codes or [1])[-1]
        # A fresh port: torch's workers would find the keys of the last attempt in the store of the old one.
        attempt = Attempt(spec, node, attempt.number + 1, free_port())
    return 0


def _run_at_a_port(attempt: Attempt, tell: Callable[[list[Failure]], None]) -> bool:
    """``run_workers``; at another port where this one was taken since it was found free, and was not asked for.

    Raises:
        LaunchError: the port is taken that was asked for, or three in a row.
    """
    from torch.distributed import DistNetworkError

    from ds_hf.launcher.agent import run_workers

    for tried in range(1, PORTS + 1):
        try:
            return run_workers(attempt, tell)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            if not attempt.spec.any_port or tried == PORTS:
                raise LaunchError(
                    f"port {attempt.port} is taken by another program\n  fix: another --master_port"
                ) from None
            attempt = replace(attempt, port=free_port())
    raise AssertionError("unreachable")


def _together(spec: NodeSpec, node: int) -> int:
    """One of several hosts: the leash decides how it ends for all."""
    from ds_hf.launcher.agent import Attempt
    from ds_hf.launcher.leash import Leash

    def stuck(code: int) -> None:
        _sweep(spec, node)
        os._exit(code or 1)

    leash = Leash(spec, node, _versions(), stuck)
    attempt = Attempt(spec, node, 0, spec.master_port)
    while True:
        _run_attempt(leash, attempt)
        ending = leash.wait_ending()
        assert ending is not None
        if ending.text and (node == 0 or ending.kind == "lost"):
            complain(ending.text)
        if ending.kind != "restart":
            leash.close()
            return ending.code
        attempt = Attempt(spec, node, leash.next_attempt(), ending.port)


def _run_attempt(leash: Leash, attempt: Attempt) -> None:
    """Run the workers once; afterwards the leash knows, or has itself caused, how it went."""
    from ds_hf.launcher.agent import SignalException, run_workers
    from ds_hf.launcher.leash import Ending

    spec, node = attempt.spec, attempt.node
    try:
        if leash.wait_go() is None and leash.workers_run(True) is None and run_workers(attempt, leash.failed):
            leash.done()
        leash.workers_run(False)
    except SignalException as error:
        leash.workers_run(False)
        if leash.ending is None:  # not the leash's own
            leash.stopped(int(error.sigval))
            leash.wait_ending(3.0)
            leash.end(Ending("stopped", 128 + int(error.sigval)))
    except (RuntimeError, ValueError, OSError) as error:
        leash.workers_run(False)
        text = f"{type(error).__name__}: {error}"
        leash.failed([Failure(spec.first_rank(node), 0, spec.hosts[node], 1, 0.0, text)])


def _prepare(spec: NodeSpec, node: int) -> None:
    slots = spec.slots[node]
    for name in [name for name in os.environ if name.startswith(_LAUNCHER_VARIABLES)]:
        del os.environ[name]
    os.environ.update(spec.env)
    os.environ[MARK] = _mark(spec, node)
    os.environ["DS_HF_LAUNCH_TIME"] = time.strftime("%Y%m%d%H%M%S")
    os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"] = str(node), str(len(spec.hosts))
    os.environ["LOCAL_SIZE"] = str(len(slots))
    if spec.set_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices.get(str(slot), str(slot)) for slot in slots)
    if "OMP_NUM_THREADS" not in os.environ:
        from ds_hf.launcher.cores import physical_cores

        os.environ["OMP_NUM_THREADS"] = str(max(1, len(physical_cores()) // len(slots)))
    if spec.cwd is not None:
        try:
            os.chdir(spec.cwd)
        except OSError as error:
            raise LaunchError(
                f"host {spec.hosts[node]}: cannot go to {spec.cwd}: {error.strerror}"
                "\n  fix: start from a folder that exists on every host"
            ) from None
    os.environ[GRACE_ENV] = f"{spec.grace:g}"


def _node_rank(text: str, spec: NodeSpec) -> int:
    name = ""
    if text == "slurm":
        name = os.environ.get("SLURMD_NODENAME", "")
        if name in spec.hosts:
            return spec.hosts.index(name)
        text = os.environ.get("SLURM_NODEID", "")
    if not text.isdecimal() or int(text) >= len(spec.hosts):
        raise LaunchError(f"node rank {text!r} ({name or 'no name'}) is none of {len(spec.hosts)} hosts")
    return int(text)


def _versions() -> str:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "ds-hf"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _watch_input(descriptor: int) -> None:
    """End this host's part when the launching host closes our input."""
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    _end_here(int(signal.SIGTERM))


def _watch_output() -> None:
    """End this host's part when our output is not read any more: the connection is gone."""
    poller = select.poll()
    poller.register(1, 0)
    poller.register(2, 0)
    gone = select.POLLERR | select.POLLHUP
    while not any(event & gone for _, event in poller.poll(1000)):
        pass
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    _end_here(int(signal.SIGHUP))


def _end_here(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(HARD_END_S)  # the main thread may be stuck in C++
    run = os.environ.get(MARK)
    if run:
        _kill_marked(run)
    os._exit(128 + signum)


def _mark(spec: NodeSpec, node: int) -> str:
    return f"{spec.run_id}/{node}/{os.getpid()}"


def _sweep(spec: NodeSpec, node: int) -> None:
    """After a bad end: kill what the workers started and left (data loaders, their own subprocesses)."""
    _kill_marked(_mark(spec, node))


def _kill_marked(mark: str) -> None:
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                process.kill()


@contextlib.contextmanager
def _pid_file(spec: NodeSpec) -> Iterator[None]:
    """``--save_pid``: this process's id in ``/tmp/<id of the first one>.deepspeed``, as DeepSpeed does."""
    if not spec.pid_file_of:
        yield
        return
    path = Path(tempfile.gettempdir(), f"{spec.pid_file_of}.deepspeed")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise LaunchError(f"--save_pid: cannot create {path}: {error.strerror}\n  fix: remove it") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
