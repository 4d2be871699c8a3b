"""What the command line asks for: DeepSpeed's launcher arguments under their names, and a few of ds_hf's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.hostfile import DEFAULT_HOSTFILE, MAX_SLOTS

__all__ = ["DEFAULT_PORT", "LAUNCHERS", "LaunchOptions"]

DEFAULT_PORT = 29500
LAUNCHERS = ("pdsh", "ssh", "openmpi", "mpich", "impi", "mvapich", "slurm")


@dataclass(frozen=True)
class LaunchOptions:
    """One command line. ``-1`` and ``""`` mean not given, as in DeepSpeed."""

    command: list[str]
    hostfile: str = DEFAULT_HOSTFILE
    include: str = ""
    exclude: str = ""
    num_nodes: int = -1
    num_gpus: int = -1
    master_addr: str = ""
    master_port: int = -1
    node_rank: int = -1
    launcher: str = ""
    launcher_args: str = ""
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    no_ssh: bool = False
    no_ssh_check: bool = False
    force_multi: bool = False
    save_pid: bool = False
    log_dir: str = ""
    bind_cores_to_rank: bool = False
    bind_core_list: str = ""
    ssh_port: int = 0
    venv_script: str = ""
    elastic_training: bool = False
    min_elastic_nodes: int = -1
    max_elastic_nodes: int = -1
    max_restarts: int = 0
    export: list[str] = field(default_factory=list)
    prefix_output: bool = False
    dry_run: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            LaunchError: with the option and the fix.
        """
        if (self.num_nodes >= 0 or self.num_gpus >= 0) and (self.include or self.exclude):
            raise LaunchError("--num_nodes/--num_gpus and --include/--exclude are both given\n  fix: give one kind")
        if self.module and self.no_python:
            raise LaunchError("--module and --no_python are both given\n  fix: give one of them")
        if self.master_port != -1 and not 0 < self.master_port < 65536:
            raise LaunchError(f"--master_port is {self.master_port}\n  fix: a port is from 1 to 65535")
        if self.launcher and self.launcher.lower() not in LAUNCHERS:
            raise LaunchError(f"--launcher is {self.launcher!r}\n  fix: one of {', '.join(LAUNCHERS)}")
        if any("\0" in word for word in self.command):
            raise LaunchError("an argument contains a NUL character, which no process can be given")
        if self.bind_core_list and not self.bind_cores_to_rank:
            raise LaunchError("--bind_core_list has no effect alone\n  fix: add --bind_cores_to_rank")
        if self.num_gpus > MAX_SLOTS:
            raise LaunchError(f"--num_gpus is {self.num_gpus}: no host has more than {MAX_SLOTS}\n  fix: fewer")
        if self.num_nodes > MAX_SLOTS:
            raise LaunchError(f"--num_nodes is {self.num_nodes}, and {MAX_SLOTS} are the most\n  fix: fewer")
        if self.max_restarts < 0:
            raise LaunchError(f"--max_restarts is {self.max_restarts}\n  fix: 0 or more")
        self._check_hosts()

    def _check_hosts(self) -> None:
        if self.node_rank >= 0 and not self.no_ssh:
            raise LaunchError("--node_rank has no effect without --no_ssh\n  fix: add --no_ssh, or leave it out")
        if self.no_ssh and self.node_rank < 0:
            raise LaunchError("--no_ssh needs --node_rank\n  fix: add --node_rank K, 0 on the first host")
        least, most = self.min_elastic_nodes, self.max_elastic_nodes
        if not self.elastic_training and (least != -1 or most != -1):
            raise LaunchError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training\n  fix: add it")
        if 0 in (least, most) or -1 < most < least:
            raise LaunchError(f"elastic between {least} and {most} nodes\n  fix: 1 or more, and the least first")
