"""The processes of one host, under torch's elastic agent, as ``python -m torch.distributed.run`` starts them.

``WorkerAgent`` adds two things to torch's ``LocalElasticAgent``: it tells of the first failure before the other workers
are stopped, and a worker that does not end in time is killed with its process group: ``GRACE_S`` after a failure or
Ctrl-C, and on a run's only host ``NodeSpec.grace`` after SIGTERM, for it may write a checkpoint. Everything else, from
the rendezvous to restarts, is torch's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ds_hf.launcher import worker
from ds_hf.launcher.cores import cores_by_rank
from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.failure import Failure, about_log
from ds_hf.launcher.spec import GRACE_S, NodeSpec

__all__ = ["Attempt", "SignalException", "WorkerAgent", "run_workers", "worker_command"]

JOIN_S = 300

OnFailure = Callable[[list[Failure]], None]


@dataclass(frozen=True)
class Attempt:
    """One start of this host's workers: ``number`` counts from 0, ``port`` is its rendezvous."""

    spec: NodeSpec
    node: int
    number: int
    port: int


def worker_command(spec: NodeSpec, processes: int, restart: int = 0) -> list[str]:
    """What the agent executes for each worker (their ranks come by the environment)."""
    python = [] if spec.no_python else [sys.executable, "-u", *(["-m"] if spec.module else [])]
    command = [*python, *spec.command]
    cores = None if spec.bind_cores is None else cores_by_rank(processes, spec.bind_cores)
    setup = {
        "agent": os.getpid(),
        "local_rank_at": len(python) + 1 if spec.local_rank_argument else None,
        "cores": cores,
        "log_dir": spec.log_dir,
        "restart": restart or None,
        "tells": spec.log_dir is None and not spec.prefix,
    }
    return [sys.executable, "-I", "-S", str(Path(worker.__file__)), json.dumps(setup), *command]


class WorkerAgent(LocalElasticAgent):
    """torch's agent with an earlier word about failures and another patience."""

    def __init__(
        self, spec: WorkerSpec, on_failure: OnFailure, host: str, log_dir: str | None, grace: float, **options: Any
    ) -> None:
        super().__init__(spec, **options)
        self._grace = grace
        self._on_failure = on_failure
        self._host = host
        self._log_dir = log_dir
        self._told_of: Any = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # torch stops the other workers inside of this call, and returns only then
        if self._told_of is not self._pcontext:
            failures = self._look(worker_group)
            if failures:
                self._told_of = self._pcontext
                self._kill_later(GRACE_S)
                self._on_failure(failures)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        failed = self._pcontext is not None and self._pcontext is self._told_of
        self._kill_later(GRACE_S if failed or death_sig == signal.SIGINT else self._grace)
        context: Any = self._pcontext
        if context is not None:  # the same once more in torch's own, which in torch 2.11 waits 30 seconds and no more
            context.close(death_sig, math.ceil(self._grace))
        super()._shutdown(death_sig, *args, **kwargs)
        if context is not None and context is self._told_of:
            # what failed workers had started themselves must not meet the next start
            _kill_groups([handler.proc for handler in context.subprocess_handlers.values()], all_of_them=True)

    def _look(self, worker_group: WorkerGroup) -> list[Failure]:
        """Failures as soon as a process has ended; then also those that were recorded where it has not ended yet."""
        context: Any = self._pcontext
        handlers = getattr(context, "subprocess_handlers", {})
        codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
        found = []
        for local_rank, code in codes.items() if any(codes.values()) else ():
            text, age = _recorded(context.error_files[local_rank])
            if code or (code is None and text):
                rank = worker_group.workers[local_rank].global_rank
                log = "" if self._log_dir is None else about_log(worker.log_file(self._log_dir, rank))
                found.append(Failure(rank, local_rank, self._host, code or 1, age, text, log))
        return found

    def _kill_later(self, seconds: float) -> None:
        handlers = list(getattr(self._pcontext, "subprocess_handlers", {}).values())
        if any(handler.proc.poll() is None for handler in handlers):
            timer = threading.Timer(seconds, _kill_groups, [[handler.proc for handler in handlers]])
            timer.daemon = True
            timer.start()


def _kill_groups(processes: list[Any], *, all_of_them: bool = False) -> None:
    """Kill the groups of processes that still run; with ``all_of_them`` also what is left of others."""
    for process in processes:
        if all_of_them or process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _recorded(path: str) -> tuple[str, float]:
    """Traceback and age in seconds of the failure in a worker's error file."""
    try:
        message = json.loads(Path(path).read_text("utf-8"))["message"]
        age = max(0.0, time.time() - os.stat(path).st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0
    if isinstance(message, str):
        return message, age
    return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")), age


def run_workers(attempt: Attempt, on_failure: OnFailure) -> bool:
    """Start this host's workers and wait for them.

    Returns:
        Whether all ended well; ``on_failure`` was called if not.

    Raises:
        SignalException: this process was asked to end; the workers have ended.
    """
    spec = attempt.spec
    slots = spec.slots[attempt.node]
    _hush_torch()
    command = worker_command(spec, len(slots), attempt.number)
    with _own_folder() as folder:
        agent = WorkerAgent(
            _worker_spec(attempt, command),
            on_failure,
            spec.hosts[attempt.node],
            spec.log_dir,
            spec.grace,
            logs_specs=DefaultLogsSpecs(log_dir=folder, tee=Std.ALL if spec.prefix else Std.NONE),
            start_method="spawn",
            log_line_prefix_template=f"[{spec.hosts[attempt.node]} ${{rank}}] " if spec.prefix else None,
        )
        result = agent.run()
    return not result.is_failed()


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="ds_hf_run_", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"cannot make a folder in {tempfile.gettempdir()}: {error.strerror}\n  fix: make room there, or set TMPDIR"
        ) from None


def _hush_torch() -> None:
    """What torch's agent logs about failures and signals, ``failure`` and ``leash`` say once and in order."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _worker_spec(attempt: Attempt, command: list[str]) -> WorkerSpec:
    spec = attempt.spec
    nodes = len(spec.hosts)
    elastic = spec.min_nodes > 0
    if elastic:  # otherwise torch's agent keeps the address where it met others the first time, also of a lost host
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parameters = RendezvousParameters(
        backend="c10d" if elastic else "static",
        endpoint=f"{spec.master_addr}:{attempt.port}",
        run_id=f"{spec.run_id}-{attempt.number}",
        min_nodes=spec.min_nodes or nodes,
        max_nodes=spec.max_nodes or nodes,
        **({"is_host": attempt.node == 0} if elastic else {"rank": attempt.node}),
        timeout=JOIN_S,
    )
    return WorkerSpec(
        role="default",
        local_world_size=len(spec.slots[attempt.node]),
        entrypoint=command[0],
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),  # the agent fills in templates
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=spec.max_restarts if elastic else 0,  # otherwise ``node`` makes a new attempt, on a new port
        monitor_interval=0.1,
        master_addr=None if elastic else spec.master_addr,
        master_port=None if elastic else attempt.port,
    )
