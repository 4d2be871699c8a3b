"""Runs a function, or a script under torchrun, on several processes of this machine, for tests.

Invariants: nothing outlives the call (every rank has its own process group, which is killed at the end, and a rank
whose parent died ends itself); nothing waits longer than ``timeout``; the failure reported is the one of the rank that
failed first, with its traceback and the end of its output.

Ranks are forked from a server that has imported torch already, so that starting one costs milliseconds and not seconds.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from ds_hf import host
from tests.helpers.patience import LONGEST_S, PATIENCE, patient

__all__ = ["DistributedFailure", "RankSpec", "free_port", "run_distributed", "run_torchrun"]

# What test modules import, as each rank imports the one that its function is from: a third of what ranks computed was
# the same imports again.
PRELOAD = [
    "tests.helpers.uncollected",
    "ds_hf.deepspeed_api.initialize",
    "torch",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "peft",
    "deepspeed",
    # What any compilation imports. It may ask for a GPU, after which no rank could begin with one.
    *([] if host.has_gpu() else ["torch._inductor.compile_fx", "torch._dynamo.backends.debugging"]),
    "pytest",
    "tests.helpers.distributed",
    "tests.helpers.warm",
]
SOON_S = 0.2  # after a rank that failed: what it is the cause of, or the cause itself, is there by then
TAIL_CHARS = 12000
NICE = 5
GRACE_S = 10.0  # for what happens at once on a quiet machine
STACK = "most recent call first"  # faulthandler's words: a rank writes its stacks when its time is over
MARK = "DS_HF_TEST_RUN"


class DistributedFailure(AssertionError):
    """A rank raised, died or ran out of time; the text tells which and why."""


@dataclass(frozen=True)
class RankSpec:
    """What one rank needs to know to start."""

    rank: int
    world_size: int
    port: int
    backend: str | None
    timeout: float
    output: str
    env: dict[str, str]
    sys_path: list[str]


def free_port() -> int:
    """A TCP port that is free on the loopback address now, and that the system does not hand out for port 0."""
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # no Linux
        end = 0
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind(("127.0.0.1", secrets.choice(range(end // 2, end)) if end > 4096 else 0))
            return int(sock.getsockname()[1])
    raise OSError("no port is free")


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
    patience: float = PATIENCE,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return what each returned, by rank.

    Args:
        fn: a function at the top level of a module (it is pickled by name).
        world_size: number of processes.
        timeout: seconds for the whole call on a quiet machine; every rank's stack is in the error when ``patience``
            times as many have run out.
        backend: process group made before ``fn`` and destroyed after it; None leaves that to ``fn``
            (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... are set either way).
        env: more environment variables for the ranks.
        start_method: "spawn" gives interpreters in which nothing is imported yet (seconds slower).

    Raises:
        DistributedFailure: with the traceback of the rank that failed first, and of those that have failed too by then.
    """
    payload = pickle.dumps((fn, args, kwargs))
    for attempt in range(3):
        try:
            return _run_once(payload, world_size, patient(timeout, patience), backend, dict(env or {}), start_method)
        except DistributedFailure as failure:  # somebody else may take the free port before rank 0 does
            if attempt == 2 or not _port_was_taken(failure):
                raise
    raise AssertionError("unreachable")


def _begins_cuda() -> bool:
    """Whether what the server imports begins CUDA in it, after which no rank that is forked from it could."""
    # transformers imports torchao (0.18) where it is installed, whose libraries do.
    return importlib.util.find_spec("torchao") is not None and host.has_gpu()


def _run_once(
    payload: bytes, world_size: int, timeout: float, backend: str | None, env: dict[str, str], start_method: str
) -> list[Any]:
    if _begins_cuda():
        start_method = "spawn"
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when the server imports it
        context.set_forkserver_preload(PRELOAD)
    port = free_port()
    ranks: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="ds_hf_test_") as folder:
        try:
            for rank in range(world_size):
                output = _output(Path(folder), rank)
                spec = RankSpec(rank, world_size, port, backend, timeout, str(output), env, list(sys.path))
                ours, theirs = context.Pipe(duplex=True)
                process = context.Process(target=_rank_main, args=(spec, payload, theirs), name=f"rank{rank}")
                process.start()
                theirs.close()
                ranks.append(process)
                pipes.append(ours)
            return _collect(ranks, pipes, timeout, Path(folder))
        finally:
            for process in ranks:
                _kill_group(process.pid)
            for process in ranks:
                process.join(10)
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(ranks: Sequence[Any], pipes: Sequence[Connection], timeout: float, folder: Path) -> list[Any]:
    """Wait for all ranks; raise as soon as one has failed."""
    results: dict[int, Any] = {}
    # Starting does not count, as the server may have to import torch first. Each rank makes its file when it has begun.
    _until(lambda: all(_output(folder, i).exists() or not rank.is_alive() for i, rank in enumerate(ranks)), LONGEST_S)
    deadline = time.monotonic() + timeout
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            _until(lambda: all(STACK in _tails(folder, [rank]) for rank in waiting.values()), GRACE_S)
            late = ", ".join(str(rank) for rank in waiting.values())
            raise DistributedFailure(
                f"rank {late}: not finished after {timeout:g} s\n{_tails(folder, waiting.values())}"
            )
        failed = {}
        while ready:  # of several that failed by now each tells: the later ones as a rule of the first
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                when, kind, content = _report(ranks[rank], pipe)
                if kind == "ok":
                    results[rank] = content
                else:
                    failed[rank] = (when, kind, content)
            ready = multiprocessing.connection.wait(list(waiting), SOON_S) if failed and waiting else []
        for _, kind, content in failed.values():
            if kind == "skipped":
                import pytest

                pytest.skip(content)
        if failed:
            first = sorted(failed, key=lambda rank: failed[rank][0])
            texts = [f"rank {i} of {len(ranks)} {failed[i][1]}: {failed[i][2]}\n{_tails(folder, [i])}" for i in first]
            raise DistributedFailure("\n".join(texts))
    sys.stdout.write(_tails(folder, [0]))
    return [results[rank] for rank in range(len(ranks))]


def _report(process: Any, pipe: Connection) -> tuple[float, str, Any]:
    """When a rank ended, how, and with what."""
    try:
        report: tuple[float, str, Any] = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(GRACE_S)
        return time.monotonic(), "died", f"exit code {process.exitcode} and no traceback"
    return report


def _until(true: Callable[[], bool], seconds: float) -> None:
    """Return when it is true, or this long has passed."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.005)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.txt"


def _tails(folder: Path, ranks: Any) -> str:
    """The end of what these ranks printed."""
    parts = []
    for rank in ranks:
        path = _output(folder, rank)
        text = path.read_text(errors="replace")[-TAIL_CHARS:] if path.exists() else ""
        if text.strip():
            parts.append(f"--- output of rank {rank}\n{text.rstrip()}\n")
    return "".join(parts)


def _kill_group(pid: int | None) -> None:
    if pid is not None:
        for send in (os.killpg, os.kill):  # a rank that was just started has no group of its own yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(pid, signal.SIGKILL)


def _rank_main(spec: RankSpec, payload: bytes, pipe: Connection) -> None:
    """What a rank runs: set up, call, report; never returns to the server's frames with an exception."""
    os.setsid()
    # The server's way would be inherited: workers of loaders would start another server, which imports torch again.
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type] # the default, as in a script
    gc.freeze()  # what the server has imported is never garbage: no collection visits it, and no page of it is copied
    _redirect_output(spec.output)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, spec.timeout - 0.1))
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    _prepare_environment(spec)
    report: tuple[float, str, Any]
    try:
        report = (time.monotonic(), "ok", _call(spec, payload))
        message = pickle.dumps(report)
    except BaseException as error:
        if type(error).__name__ == "Skipped":
            report = (time.monotonic(), "skipped", str(error))
        else:
            report = (time.monotonic(), "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        message = pickle.dumps(report)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        pipe.send_bytes(message)
    if report[1] == "ok":
        # Peers may still be in a collective, or ask rank 0's store for an address: the parent ends all ranks together.
        threading.Event().wait()
    os._exit(1)  # exit handlers could hang on a peer that is gone


def _call(spec: RankSpec, payload: bytes) -> Any:
    sys.path[:] = spec.sys_path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fn, args, kwargs = pickle.loads(payload)
    _let_gloo_wait()
    if spec.backend is not None:
        from datetime import timedelta

        if spec.backend == "nccl":
            torch.cuda.set_device(spec.rank)
        dist.init_process_group(spec.backend, timeout=timedelta(seconds=spec.timeout))
    result = fn(*args, **kwargs)
    if spec.backend is not None and dist.is_initialized():
        dist.barrier()  # nobody closes its sockets while a peer still talks to it
        dist.destroy_process_group()
    return result


def _let_gloo_wait() -> None:
    """While a thread that waits for a core holds the lock of a connection, gloo's loop over its sockets asks the kernel
    again and again: on a busy machine that took a quarter of two cores. Less urgent, it leaves them to that thread."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper

    def made(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        with contextlib.suppress(OSError):  # a thread that has ended; no Linux
            for task in Path("/proc/self/task").iterdir():
                if (task / "comm").read_text() == "gloo_tcp_loop\n":
                    os.setpriority(os.PRIO_PROCESS, int(task.name), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        return group

    distributed_c10d._new_process_group_helper = made


def _prepare_environment(spec: RankSpec) -> None:
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec.port),
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    os.environ.update(spec.env)


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The server's stream objects may be pytest's; these write where the rank's output belongs.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


def _end_with_parent(pipe: Connection) -> None:
    """The parent never sends: readable means that it is gone."""
    with contextlib.suppress(EOFError, OSError):
        pipe.poll(None)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def run_torchrun(
    script: str | os.PathLike[str],
    *args: str,
    world_size: int = 2,
    timeout: float = 110.0,
    patience: float = PATIENCE,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> str:
    """Run ``script`` under torchrun as a user would and return what it printed (both streams).

    Raises:
        DistributedFailure: with the end of the output, if it fails or takes longer than ``patience`` times ``timeout``
            seconds.
    """
    for attempt in range(3):
        try:
            return _run_torchrun_once(script, args, world_size, patient(timeout, patience), env, cwd)
        except DistributedFailure as failure:  # somebody else may take the free port before torchrun does
            if attempt == 2 or not _port_was_taken(failure):
                raise
    raise AssertionError("unreachable")


def _port_was_taken(failure: DistributedFailure) -> bool:
    text = str(failure).lower()
    return os.strerror(errno.EADDRINUSE).lower() in text or "eaddrinuse" in text


def _run_torchrun_once(
    script: str | os.PathLike[str],
    args: Sequence[str],
    world_size: int,
    timeout: float,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", os.fspath(script), *args]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    mark = uuid.uuid4().hex
    surroundings.update({**(env or {}), MARK: mark})
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=surroundings,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill_marked(mark)
            output, _ = process.communicate()
            raise DistributedFailure(f"not finished after {timeout:g} s\n{output[-TAIL_CHARS:]}") from None
        finally:
            _kill_marked(mark)
    if process.returncode != 0:
        raise DistributedFailure(f"exit code {process.returncode}\n{output[-TAIL_CHARS:]}")
    return output


def _kill_marked(mark: str) -> None:
    """Kill every process that inherited ``mark``: torchrun gives each worker a session of its own."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()
