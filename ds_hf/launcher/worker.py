"""Runs before the script in each process: adds ``--local_rank``, binds cores, redirects output, becomes the script.

It also has the kernel kill the process when the agent that started it is gone, however that ended: an agent killed by
SIGKILL leaves no worker. Run by path with ``python -I -S`` and the standard library alone, so that it costs
milliseconds; ``exec`` keeps the process id that torch's agent watches.

Usage: ``worker.py JSON command...``; JSON has ``agent`` (its process id), ``local_rank_at`` (index in the command where
the argument goes, or null), ``cores`` (a list of core lists by local rank, or null), ``log_dir``, ``restart`` (number
of the attempt, or null), ``tells`` (whether the launcher tells of failures in the process's place).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Prepare this process as the JSON says and become the command."""
    setup = json.loads(arguments[0])
    _die_with(setup["agent"])
    command = arguments[1:]
    local_rank = int(os.environ["LOCAL_RANK"])
    if setup["restart"]:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(setup["restart"])
    if setup.get("tells"):  # ds_hf.engine.comm.failure_record: the launcher shows the traceback
        os.environ["DS_HF_LAUNCH_TELLS"] = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if setup["cores"]:
        cores = setup["cores"][local_rank]
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    if setup["log_dir"]:
        try:
            _redirect(setup["log_dir"], os.environ["RANK"])
        except OSError as error:
            sys.exit(f"ds_hf: --enable_each_rank_log: {error.filename}: {error.strerror}")
    if setup["local_rank_at"] is not None:
        command.insert(setup["local_rank_at"], f"--local_rank={local_rank}")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _die_with(agent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:  # gone before we asked
        sys.exit(1)


def log_file(folder: str, rank: int | str) -> str:
    """Where the output of ``rank`` goes."""
    return os.path.join(folder, f"{os.environ['DS_HF_LAUNCH_TIME']}_rank{rank}.log")


def _redirect(folder: str, rank: str) -> None:
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
