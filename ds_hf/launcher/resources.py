"""Which hosts and slots a run takes: the hostfile, this machine, or Slurm's allocation, and the filters on it.

Without a hostfile it is this machine: its GPUs, those of CUDA_VISIBLE_DEVICES where that is set (filters then choose
among them), or, without GPUs, as many processes as ``--num_gpus`` says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.filters import first_nodes_and_slots, select
from ds_hf.launcher.hostfile import DEFAULT_HOSTFILE, Pool, check_host_name, read_hostfile
from ds_hf.launcher.options import LaunchOptions

__all__ = ["Resources", "find_resources", "gpu_count"]

LOCALHOST = "localhost"
PROCESSES_A_CORE = 64  # more would only fill the memory


@dataclass(frozen=True)
class Resources:
    """Hosts and slots in rank order.

    Attributes:
        local: there is no hostfile: the one host is this machine, whatever it is called.
        devices: what CUDA_VISIBLE_DEVICES calls the slots where it does not call them by number.
        set_devices: CUDA_VISIBLE_DEVICES is to be set to the slots.
    """

    pool: Pool
    local: bool
    devices: Mapping[str, str] = field(default_factory=dict)
    set_devices: bool = True


def find_resources(options: LaunchOptions, env: Mapping[str, str]) -> Resources:
    """Resolve hostfile, allocation or machine, and the filters.

    Raises:
        LaunchError: names what is wrong, where, and the fix.
    """
    pool = read_hostfile(options.hostfile, explicit=options.hostfile != DEFAULT_HOSTFILE)
    if pool is None and options.launcher.lower() == "slurm" and "SLURM_JOB_NODELIST" in env:
        pool = _slurm_pool(options, env)
    if pool is not None:
        chosen = first_nodes_and_slots(
            select(pool, options.include, options.exclude), options.num_nodes, options.num_gpus
        )
        return Resources(chosen, local=False)
    if options.no_ssh and options.num_nodes > 1:
        return _numbered_hosts(options)
    if options.num_nodes > 1:
        raise LaunchError(
            f"--num_nodes is {options.num_nodes}, and there is no hostfile ({options.hostfile})"
            "\n  fix: --hostfile FILE with a line `host slots=N` for each host"
        )
    return _this_machine(options, env)


def gpu_count() -> int:
    """Number of GPUs that torch sees here, CUDA_VISIBLE_DEVICES regarded."""
    import torch

    return torch.cuda.device_count()


def _this_machine(options: LaunchOptions, env: Mapping[str, str]) -> Resources:
    count = gpu_count()
    if count == 0:
        if options.include or options.exclude:
            pool = select({LOCALHOST: tuple(range(os.cpu_count() or 1))}, options.include, options.exclude)
        else:
            first_nodes_and_slots({LOCALHOST: (0,)}, options.num_nodes)
            processes = 1 if options.num_gpus == -1 else options.num_gpus
            most = PROCESSES_A_CORE * (os.cpu_count() or 1)
            if processes > most:
                raise LaunchError(
                    f"--num_gpus is {processes}: there is no GPU, and {most} processes are the most for the "
                    f"{os.cpu_count()} cores of this machine\n  fix: fewer"
                )
            pool = first_nodes_and_slots({LOCALHOST: tuple(range(max(processes, 1)))}, num_gpus=options.num_gpus)
        return Resources(pool, local=True, set_devices=False)
    names = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()][:count]
    numbered = all(name.isdecimal() for name in names)
    slots = tuple(int(name) for name in names) if names and numbered else tuple(range(count))
    devices = dict(zip(map(str, slots), names, strict=False)) if names and not numbered else {}
    pool = select({LOCALHOST: slots}, options.include, options.exclude)
    return Resources(first_nodes_and_slots(pool, options.num_nodes, options.num_gpus), local=True, devices=devices)


def _numbered_hosts(options: LaunchOptions) -> Resources:
    """``--no_ssh --num_nodes N`` without a hostfile: hosts without names, all like this one."""
    if options.include or options.exclude:
        raise LaunchError("--include and --exclude need a hostfile\n  fix: --hostfile FILE, or --num_gpus")
    each = options.num_gpus if options.num_gpus > 0 else max(gpu_count(), 1)
    pool = {f"node{rank}": tuple(range(each)) for rank in range(options.num_nodes)}
    return Resources(pool, local=False, set_devices=gpu_count() > 0)


def _slurm_pool(options: LaunchOptions, env: Mapping[str, str]) -> Pool:
    if shutil.which("scontrol") is None:
        raise LaunchError(
            "--launcher slurm: no `scontrol` here\n  fix: start from a Slurm allocation, or give --hostfile"
        )
    names = subprocess.run(
        ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=False
    ).stdout.split()
    wrong = [reason for reason in map(check_host_name, names) if reason]
    if not names or wrong:
        raise LaunchError(f"Slurm's allocation {env['SLURM_JOB_NODELIST']!r} cannot be read: {wrong or 'no hosts'}")
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    each = options.num_gpus if options.num_gpus > 0 else int(gpus) if gpus.isdecimal() else 1
    return {name: tuple(range(each)) for name in names}
