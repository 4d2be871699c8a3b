"""Files through the C++ queue: values, what it says of faults, and DeepSpeed's names on top of it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ds_hf.engine.offload import handle
from ds_hf.engine.offload.aio import Aio
from ds_hf.engine.offload.memory import host_empty
from ds_hf.errors import OffloadError

KINDS = [{"uring": True}, {"uring": False}, {"uring": False, "direct": False}]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that: what a full disk does to a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 4096, 3_000_001])
def test_what_is_written_is_read(tmp_path: Path, kind: dict[str, bool], numel: int) -> None:
    aio = Aio(block=65536, depth=4, threads=2, **kind)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    source, target = host_empty(numel, torch.float32, pinned=False), host_empty(numel, torch.float32, pinned=False)
    source.copy_(values)
    assert aio.write(tmp_path / "x", source).wait() == numel * 4
    assert (tmp_path / "x").stat().st_size == numel * 4
    aio.read(tmp_path / "x", target).wait()
    assert torch.equal(target, values)
    assert torch.equal(torch.frombuffer(bytearray((tmp_path / "x").read_bytes()), dtype=torch.float32), values)
    aio.close()


def test_a_file_system_without_direct_access() -> None:
    folder = Path("/dev/shm") / f"ds_hf_test_{os.getpid()}"
    folder.mkdir()
    try:
        aio = Aio()
        memory = host_empty(50_000, torch.float32, pinned=False).fill_(3)
        aio.write(folder / "x", memory).wait()
        memory.zero_()
        aio.read(folder / "x", memory).wait()
        assert bool((memory == 3).all())
    finally:
        shutil.rmtree(folder)


def test_faults_name_the_file(tmp_path: Path) -> None:
    aio = Aio(block=4096, depth=2)
    memory = host_empty(10_000, torch.float32, pinned=False)
    with pytest.raises(OffloadError, match=r"absent.bin is gone"):
        aio.read(tmp_path / "absent.bin", memory).wait()
    (tmp_path / "short.bin").write_bytes(b"1" * 9000)
    with pytest.raises(OffloadError, match=r"short.bin ends after \d+ of 40000 bytes"):
        aio.read(tmp_path / "short.bin", memory).wait()
    with files_of_at_most(16384), pytest.raises(OffloadError, match=r"full.bin cannot take 0.0 MiB \(File too large\)"):
        aio.write(tmp_path / "full.bin", memory).wait()
    with pytest.raises(OffloadError, match="cannot be opened: Is a directory"):
        aio.write(tmp_path, memory).wait()
    with pytest.raises(ValueError, match="contiguous host memory"):
        aio.write(tmp_path / "x", torch.zeros(4, 4).t())
    assert aio.write(tmp_path / "fine.bin", memory).wait() == 40_000  # the queue goes on


def test_the_names_of_deepspeed(tmp_path: Path) -> None:
    io = handle.aio_handle(1 << 16, 8, False, True, 2)
    settings = io.get_block_size(), io.get_queue_depth(), io.get_single_submit(), io.get_overlap_events()
    assert (*settings, io.get_intra_op_parallelism()) == (65536, 8, False, True, 2)
    path = str(tmp_path / "x")
    source = torch.arange(30_000, dtype=torch.bfloat16).view(100, 300)
    assert io.sync_pwrite(source, path) == 1
    target = torch.zeros(100, 300, dtype=torch.bfloat16)
    assert io.async_pread(target, path) == 0
    assert io.async_pread(torch.zeros(10), path, 400) == 0
    assert io.wait() == 2
    assert torch.equal(target, source)
    transposed = torch.zeros(300, 100, dtype=torch.bfloat16).t()
    assert io.pread(transposed, path, True, False) == 1
    assert torch.equal(transposed, source)
    locked = io.new_cpu_locked_tensor(64, source)
    assert (locked.shape, locked.dtype, locked.data_ptr() % 4096) == ((64,), torch.bfloat16, 0)
    assert io.free_cpu_locked_tensor(locked)
    assert not io.free_cpu_locked_tensor(locked)
    with open(path, "r+b") as file:
        assert io.async_pwrite(torch.ones(5, dtype=torch.bfloat16), file.fileno(), 10) == 0
        assert io.wait() == 1
    assert handle.aio_read(target, path, 4096, 2, False, False, True) == 1
    assert target.flatten()[:11].tolist() == [0, 1, 2, 3, 4, 1, 1, 1, 1, 1, 10]
    io.async_pread(target, str(tmp_path / "absent"))
    with pytest.raises(OffloadError, match="absent is gone"):
        io.wait()
