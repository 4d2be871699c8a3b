"""Processes, cores and memory of the host, as launchers, control groups and the machine say."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from ds_hf import host

GIB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """64 GiB, 48 of them free, and no group with a limit; gives the root of the groups."""
    memory = type("Memory", (), {"total": 64 * GIB, "available": 48 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(host, "OWN", tmp_path / "own")
    return tmp_path / "cgroup"


def test_without_limits_the_machines(machine: Path) -> None:
    assert (host.total_memory(), host.available_memory()) == (64 * GIB, 48 * GIB)
    write(machine, memory__max="max\n", memory__current=str(GIB))
    assert (host.total_memory(), host.available_memory()) == (64 * GIB, 48 * GIB)


def test_of_a_container_with_what_the_kernel_can_take_back(machine: Path) -> None:
    write(machine, memory__max=str(16 * GIB), memory__current=str(12 * GIB))
    assert (host.total_memory(), host.available_memory()) == (16 * GIB, 4 * GIB)
    write(machine, memory__stat=f"anon 5\ninactive_file {5 * GIB}\nactive_file {GIB}\n")
    assert host.available_memory() == 10 * GIB
    write(machine, memory__current=str(40 * GIB))
    assert host.available_memory() == 0


def test_of_a_job_below_the_root(machine: Path) -> None:
    """The least of the group's own limit and those around it."""
    host.OWN.write_text("0::/slurm/job_7/step_0\n")
    write(machine / "slurm", memory__max=str(60 * GIB), memory__current="0")
    write(machine / "slurm/job_7", memory__max=str(8 * GIB), memory__current=str(2 * GIB))
    write(machine / "slurm/job_7/step_0", memory__max="max", memory__current=str(GIB))
    assert (host.total_memory(), host.available_memory()) == (8 * GIB, 6 * GIB)


def test_of_the_first_version(machine: Path) -> None:
    host.OWN.write_text("11:cpu,cpuacct:/elsewhere\n4:memory:/docker/1\n")
    folder = machine / "memory/docker/1"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(4 * GIB))
    (folder / "memory.usage_in_bytes").write_text(str(GIB))
    (machine / "memory/memory.limit_in_bytes").write_text(str((1 << 63) - 4096))  # none, in its words
    (machine / "memory/memory.usage_in_bytes").write_text(str(GIB))
    assert (host.total_memory(), host.available_memory()) == (4 * GIB, 3 * GIB)


@pytest.mark.parametrize(("said", "known", "used"), [("4", 4, 4), ("", None, 1), ("0", None, 1), ("many", None, 1)])
def test_processes(said: str, known: int | None, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert (host.known_processes(), host.local_world_size()) == (known, used)


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert host.rank_cores() == [4, 5, 6, 7]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_RANK", "9")
    assert host.rank_cores() == [1]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert host.rank_cores() == list(range(8))


def test_the_cache_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    assert host.user_cache() == Path("/a/cache/ds_hf")
    monkeypatch.setenv("HOME", "/home/some")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert host.user_cache() == Path("/home/some/.cache/ds_hf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert host.user_cache() == Path("/home/some/.cache/ds_hf")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(homeless))  # a container whose user has no name
    assert host.user_cache() == Path(tempfile.gettempdir()) / f"ds_hf-{os.geteuid()}"
