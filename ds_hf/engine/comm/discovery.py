"""Who this process is, from what started it: torchrun, an MPI's mpirun, or Slurm's srun.

torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR) win. Otherwise they are made from mpirun's or srun's.
Where several hosts are in the run and MASTER_ADDR is not set, mpi4py, if it is installed, or Slurm's list of hosts
tells it. Slurm's variables count only inside a step that srun started: a batch script has them too, and is one process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from importlib.util import find_spec

__all__ = ["discover", "first_host"]

LOOPBACK = "127.0.0.1"
# rank, world size, local rank, processes of this host: Open MPI; MPICH, Intel MPI and MVAPICH (Hydra); Cray PALS
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def discover(env: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR as far as mpirun or srun tell and ``env`` lacks them."""
    if "RANK" in env or "WORLD_SIZE" in env:
        return {}
    for rank, size, local_rank, local_size in (*_MPI, _SLURM):
        if rank not in env or size not in env:
            continue
        if local_rank not in env and rank == "PMI_RANK" and "PALS_LOCAL_RANKID" in env:
            continue
        found = {"RANK": env[rank], "WORLD_SIZE": env[size]}
        if local_rank in env:
            found["LOCAL_RANK"] = env[local_rank]
        slurm = rank == _SLURM[0]
        address = _slurm_address(env) if slurm else _mpi_address(env, size, local_size)
        if "MASTER_ADDR" not in env and address:
            found["MASTER_ADDR"] = address
        return found
    return {}


def _mpi_address(env: Mapping[str, str], size: str, local_size: str) -> str | None:
    if env[size] == "1" or env.get(local_size) == env[size]:
        return LOOPBACK
    if "MASTER_ADDR" in env or find_spec("mpi4py") is None:
        return None
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

    mine = _own_address() if MPI.COMM_WORLD.Get_rank() == 0 else None
    address: str | None = MPI.COMM_WORLD.bcast(mine, root=0)
    return address


def _slurm_address(env: Mapping[str, str]) -> str | None:
    if env["SLURM_STEP_NUM_TASKS"] == "1":
        return LOOPBACK
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return first_host(hosts) if hosts else None


def first_host(nodelist: str) -> str:
    """The first name of a Slurm host list such as ``gpu[007-009,12],login1``: gpu007."""
    head = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodelist)
    if head is None:
        return nodelist
    number = (head.group(2) or "").split(",")[0].split("-")[0]
    return head.group(1) + number + (head.group(3) or "")


def _own_address() -> str:
    """This host's address on its default route, else what its name resolves to."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("10.255.255.255", 9))
            return str(sock.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
