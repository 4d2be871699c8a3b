"""Who a process is under torchrun, every MPI and Slurm, and what it must not believe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types

import pytest

from ds_hf.engine.comm import discovery
from ds_hf.engine.comm.discovery import discover, first_host

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[007-008,11]",
    "SLURM_JOB_NODELIST": "gpu[001-099]",
}


@pytest.fixture(autouse=True)
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "find_spec", lambda name: None)


def test_torchrun_wins() -> None:
    assert discover({"RANK": "0", "WORLD_SIZE": "2", **OPENMPI, **SLURM}) == {}
    assert discover({}) == {}


def test_open_mpi_on_several_hosts_needs_an_address() -> None:
    assert discover(OPENMPI) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert "MASTER_ADDR" not in discover({**OPENMPI, "MASTER_ADDR": "a"})


def test_one_host_is_the_loopback() -> None:
    assert discover({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})["MASTER_ADDR"] == "127.0.0.1"
    assert discover(HYDRA) == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}


def test_cray() -> None:
    env = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "2", "PALS_LOCAL_SIZE": "4"}
    assert discover(env) == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}


def test_mpi4py_tells_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        @staticmethod
        def Get_rank() -> int:  # noqa: N802
            return 3

        @staticmethod
        def bcast(value: str | None, root: int) -> str:
            assert (value, root) == (None, 0)
            return "10.0.0.9"

    package = types.ModuleType("mpi4py")
    package.MPI = types.SimpleNamespace(COMM_WORLD=World)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setattr(discovery, "find_spec", lambda name: object())
    assert discover(OPENMPI)["MASTER_ADDR"] == "10.0.0.9"


def test_slurm_step() -> None:
    assert discover(SLURM) == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu007"}


def test_a_batch_script_is_not_a_step() -> None:
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a"}) == {}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[3-5]", "gpu3"),
        ("gpu[003,9],x", "gpu003"),
        ("r[1-2]n4,z", "r1n4"),
        ("a-b[10]", "a-b10"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


CODE = """
import json, os, torch, torch.distributed as dist
from ds_hf.engine.comm import process_group
process_group.init_distributed("gloo", distributed_port=PORT)
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
ranks = os.environ["RANK"], os.environ["LOCAL_RANK"], process_group.get_local_rank()
print(json.dumps([total.item(), *ranks]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here (Debian: openmpi-bin)")
def test_a_script_under_mpirun_without_anything_set() -> None:
    from tests.helpers.distributed import free_port

    code = CODE.replace("PORT", str(free_port()))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in names}
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert lines == [[3.0, "0", "0", 0], [3.0, "1", "1", 1]]
