"""``deepspeed.launcher.constants``: names of the launchers."""

from __future__ import annotations

from .._missing import missing

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"

__getattr__ = missing(__name__)
