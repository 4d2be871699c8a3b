"""How each host's part is started: by ssh, pdsh, an MPI's mpirun, or srun; their command lines and nothing else.

Whatever starts it, one ``ds_hf.launcher.node`` runs on each host and starts that host's processes. Its command goes
through a login shell on the way (not with mpirun and srun), so every word of it is quoted, and all that users write is
inside one base64 word. Failures of the network are noticed by ssh's keep-alives and the leash, in about ten seconds.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.options import LaunchOptions
from ds_hf.launcher.spec import NodeSpec, encode

__all__ = ["STARTERS", "Start", "check_tools", "node_command", "ssh_command", "start_commands"]

KEEP_ALIVE = ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"]
SSH = ["ssh", "-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *KEEP_ALIVE]
PDSH_FAN_OUT = 1024


@dataclass(frozen=True)
class Start:
    """One process on the launching host.

    ``stdin_leash``: closing its input ends the far side. ``end_by_ssh``: it does not pass signals on, so the far sides
    must be told one by one.
    """

    hosts: list[str]
    command: list[str]
    env: dict[str, str]
    stdin_leash: bool = False
    end_by_ssh: bool = False


def ssh_command(host: str, remote: str, options: LaunchOptions) -> list[str]:
    """``remote``, already quoted for a shell, on ``host``."""
    port = ["-p", str(options.ssh_port)] if options.ssh_port else []
    extra = shlex.split(options.launcher_args) if options.launcher in ("ssh", "") else []
    return [*SSH, *port, *extra, "--", host, remote]


def node_command(spec: NodeSpec, node_rank: str, options: LaunchOptions, *, stdin_leash: bool = False) -> list[str]:
    """The command of one host, as words; ``PYTHONPATH`` and ``--venv_script`` must be there before Python starts."""
    leash = ["--stdin_leash"] if stdin_leash else []
    command = [sys.executable, "-u", "-m", "ds_hf.launcher.node", f"--run={spec.run_id}"]
    command += [f"--node_rank={node_rank}", *leash, encode(spec)]
    path = spec.env.get("PYTHONPATH", "")
    if "\n" in path:
        raise LaunchError("PYTHONPATH has a newline in it\n  fix: take it out")
    if path:
        command = ["env", f"PYTHONPATH={path}", *command]
    if options.venv_script:
        command = ["sh", "-c", '. "$0" && exec "$@"', options.venv_script, *command]
    return command


def start_commands(spec: NodeSpec, options: LaunchOptions) -> list[Start]:
    """What to run on this machine to start every host's part."""
    starter = STARTERS[options.launcher]
    return starter(spec, options)


def check_tools(options: LaunchOptions) -> None:
    """Refuse a launcher whose program is not here."""
    program, package = _PROGRAMS[options.launcher]
    if shutil.which(program) is None:
        raise LaunchError(
            f"--launcher {options.launcher}: there is no `{program}` on this machine"
            f"\n  fix: install it (Debian: {package}), or take --launcher ssh"
        )


def _ssh(spec: NodeSpec, options: LaunchOptions) -> list[Start]:
    starts = []
    for rank, host in enumerate(spec.hosts):
        remote = shlex.join(["exec", *node_command(spec, str(rank), options, stdin_leash=True)])
        starts.append(Start([host], ssh_command(host, remote, options), {}, stdin_leash=True))
    return starts


def _pdsh(spec: NodeSpec, options: LaunchOptions) -> list[Start]:
    words = node_command(spec, "@rank@", options)
    # pdsh replaces %n by the host's index, and reads % elsewhere too: a literal one would be written %%
    remote = shlex.join(["exec", *words]).replace("%", "%%").replace("@rank@", "%n")
    port = ["-p", str(options.ssh_port)] if options.ssh_port else []
    appended = shlex.join(["-o", "BatchMode=yes", *KEEP_ALIVE, *port])
    extra = shlex.split(options.launcher_args)
    command = ["pdsh", "-S", "-R", "ssh", "-f", str(PDSH_FAN_OUT), *extra, "-w", ",".join(spec.hosts), remote]
    return [Start(spec.hosts, command, {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": appended}, end_by_ssh=True)]


def _openmpi(spec: NodeSpec, options: LaunchOptions) -> list[Start]:
    ssh = shlex.join(["-o", "BatchMode=yes", *KEEP_ALIVE, *(["-p", str(options.ssh_port)] if options.ssh_port else [])])
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "--leave-session-attached"]
    for name, value in {
        "plm_rsh_args": ssh,
        "odls_base_sigkill_timeout": "2",  # it always waits so long, twice
        "oob_tcp_keepalive_time": "3",
        "oob_tcp_keepalive_intvl": "2",
        "oob_tcp_keepalive_probes": "3",
    }.items():
        command += ["--mca", name, value]
    command += shlex.split(options.launcher_args)
    parts = [
        ["-host", f"{host}:1", "-np", "1", *node_command(spec, str(rank), options)]
        for rank, host in enumerate(spec.hosts)
    ]
    return [Start(spec.hosts, [*command, *_joined(parts)], {})]


def _hydra(spec: NodeSpec, options: LaunchOptions) -> list[Start]:
    """MPICH, Intel MPI and MVAPICH: their mpirun is Hydra."""
    command = ["mpirun", *shlex.split(options.launcher_args)]
    parts = [
        ["-host", host, "-n", "1", *node_command(spec, str(rank), options)] for rank, host in enumerate(spec.hosts)
    ]
    env = {"I_MPI_PIN": "0"} if options.launcher == "impi" else {}
    return [Start(spec.hosts, [*command, *_joined(parts)], env)]


def _slurm(spec: NodeSpec, options: LaunchOptions) -> list[Start]:
    for host, slots in zip(spec.hosts, spec.slots, strict=True):
        if slots != list(range(len(slots))):
            raise LaunchError(
                f"--launcher slurm cannot choose slots {slots} on {host}: Slurm hands out GPUs itself"
                "\n  fix: filter whole hosts, or use --num_gpus"
            )
    nodes = str(len(spec.hosts))
    command = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
    command += [
        "--nodelist",
        ",".join(spec.hosts),
        "--unbuffered",
        "--cpu-bind=none",
        *shlex.split(options.launcher_args),
    ]
    return [Start(spec.hosts, [*command, *node_command(spec, "slurm", options)], {})]


def _joined(parts: list[list[str]]) -> list[str]:
    """The parts of an MPMD command line, with ``:`` between them."""
    return [word for index, part in enumerate(parts) for word in ([":", *part] if index else part)]


STARTERS: dict[str, Callable[[NodeSpec, LaunchOptions], list[Start]]] = {
    "ssh": _ssh,
    "pdsh": _pdsh,
    "openmpi": _openmpi,
    "mpich": _hydra,
    "impi": _hydra,
    "mvapich": _hydra,
    "slurm": _slurm,
}
_PROGRAMS = {
    "ssh": ("ssh", "openssh-client"),
    "pdsh": ("pdsh", "pdsh"),
    "openmpi": ("mpirun", "openmpi-bin"),
    "mpich": ("mpirun", "mpich"),
    "impi": ("mpirun", "Intel MPI"),
    "mvapich": ("mpirun", "MVAPICH"),
    "slurm": ("srun", "slurm-client"),
}
