"""Blocks that go in and out of memory, and the folder of their files."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_hf.engine.offload.aio import Aio
from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.folder import SwapFolder, examine
from ds_hf.engine.offload.link import DONE
from ds_hf.engine.offload.memory import host_copy, host_empty
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.errors import OffloadError
from tests.engine.offload.test_aio import files_of_at_most

N = 5000


class CutOf:
    """What an optimizer takes for a parameter."""

    def __init__(self, block: Block, start: int, end: int) -> None:
        self.start, self.low = start, None
        self.param = torch.nn.Parameter(block.values[start:end])


def pool_of(folder: Path, slots: int, blocks: int) -> tuple[SwapPool, list[Block]]:
    pool = SwapPool(SwapFolder(folder), Aio(block=8192, depth=2), slots, pinned=False)
    made = [Block(torch.full((N,), float(i)), f"unit {i}") for i in range(blocks)]
    for block in made:
        pool.add(block)
    return pool, made


def test_values_come_back_whatever_the_order(tmp_path: Path) -> None:
    pool, blocks = pool_of(tmp_path, 2, 6)
    generator = torch.Generator().manual_seed(0)
    expected = [float(i) for i in range(6)]
    for turn in range(60):
        index = int(torch.randint(6, (), generator=generator))
        pool.prefetch(blocks[int(torch.randint(6, (), generator=generator))])
        pool.visit(blocks[index], write=turn % 3 != 0, fresh=turn % 7 == 1)
        if turn % 7 != 1:
            assert blocks[index].values.eq(expected[index]).all(), turn
        if turn % 3 != 0 or turn % 7 == 1:
            pool.visit(blocks[index], write=True)
            blocks[index].values.fill_(turn)
            expected[index] = float(turn)
        if turn % 5 == 0:
            pool.flush(blocks[index])
        pool.guard(blocks[index], DONE)
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_slots_that_no_block_needs_are_not_made(tmp_path: Path) -> None:
    """``buffer_count`` may be any number."""
    pool, blocks = pool_of(tmp_path, 1000, 3)
    assert [pool.in_memory(block) for block in blocks] == [True] * 3
    assert len(pool._slots) == 3
    pool.close()


def test_at_rest_there_are_shapes_and_no_values(tmp_path: Path) -> None:
    pool, blocks = pool_of(tmp_path, 2, 4)
    at_rest = [block for block in blocks if block.memory is None]
    assert len(at_rest) == 2
    assert at_rest[0].values.shape == (N,)
    assert bool(at_rest[0].values.isnan().all())
    with pytest.raises(RuntimeError, match="single memory location"):
        at_rest[0].values.add_(1)
    pool.close()


def test_moments_that_an_update_makes_go_along(tmp_path: Path) -> None:
    pool, blocks = pool_of(tmp_path, 2, 5)
    states: list[dict[object, dict[str, torch.Tensor]]] = []
    cuts = []
    for block in blocks:
        pool.visit(block, write=True)
        cuts.append([CutOf(block, 0, 1000), CutOf(block, 1024, N)])
        states.append({cut.param: {} for cut in cuts[-1]})
        block.bind(cuts[-1], states[-1])
    for index, block in enumerate(blocks):
        pool.visit(block, write=True)
        for cut in cuts[index]:
            states[index][cut.param]["exp_avg"] = torch.full_like(cut.param, 10.0 + index)
            states[index][cut.param]["step"] = torch.tensor(1.0)
        pool.flush(block)
    for index, block in enumerate(blocks):
        pool.visit(block, write=False)
        for cut in cuts[index]:
            assert bool((states[index][cut.param]["exp_avg"] == 10.0 + index).all())
            assert bool((cut.param == index).all())
            assert cut.param.data_ptr() == block.values.data_ptr() + 4 * cut.start
    assert block.nbytes == 2 * 20480  # 5000 x 4 bytes, whole pages
    pool.close()


@pytest.mark.parametrize("fault", ["missing", "truncated", "full"])
def test_after_a_fault_nothing_goes_on(tmp_path: Path, fault: str) -> None:
    pool, blocks = pool_of(tmp_path, 2, 4)
    for index in (2, 3):
        pool.visit(blocks[index], write=False)
    (file,) = tmp_path.glob("*/00000_unit_0.bin")
    if fault == "full":
        pool.visit(blocks[3], write=True)
        with files_of_at_most(8192):
            pool.flush(blocks[3])
            with pytest.raises(OffloadError, match=r"00003_unit_3.bin cannot take"):
                pool.visit(blocks[3], write=False)
    else:
        file.unlink() if fault == "missing" else os.truncate(file, 100)
        expected = (
            "00000_unit_0.bin is gone" if fault == "missing" else "00000_unit_0.bin ends after 100 of 20480 bytes"
        )
        with pytest.raises(OffloadError, match=expected):
            pool.visit(blocks[0], write=False)
    with pytest.raises(OffloadError, match=r"states were lost: .*again from the last checkpoint"):
        pool.visit(blocks[1], write=False)
    pool.close()


@pytest.mark.slow
def test_folders_go_with_their_owner(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path)
    assert folder.path.is_dir()
    del folder
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    code = (
        "import os, signal, sys; from ds_hf.engine.offload.folder import SwapFolder; folder = SwapFolder(sys.argv[1]);"
        "(folder.path / 'x').write_text('y'); sys.argv[2] == 'kill' and os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path, "exit"])
    assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
    living = SwapFolder(tmp_path)
    killed = subprocess.run([sys.executable, "-c", code, tmp_path, "kill"])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    last = SwapFolder(tmp_path)  # removes what the dead one left, and leaves the living alone
    assert set(tmp_path.iterdir()) == {living.path, last.path}


def test_a_disk_is_tried_before_training(tmp_path: Path) -> None:
    folder, aio = SwapFolder(tmp_path), Aio()
    disk = examine(folder, aio, 1 << 20, 2)
    assert disk.read > 1e6
    assert disk.write > 1e6
    assert "GiB free" in str(disk)
    assert [path.name for path in folder.path.iterdir()] == ["owner.lock"]
    with pytest.raises(
        OffloadError, match=r"GiB free, and offload needs 2097152.0 GiB there \(processes of this host: 2\)"
    ):
        examine(folder, aio, 1 << 50, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"nvme_path .*file cannot be used"):
        SwapFolder(tmp_path / "file")


def test_host_memory_is_aligned_and_zero() -> None:
    made = host_empty(3, torch.bfloat16, pinned=True)
    assert (made.data_ptr() % 4096, made.tolist()) == (0, [0, 0, 0])
    copied = host_copy(torch.ones(2, 2), torch.float16, pinned=False)
    assert (copied.dtype, copied.tolist()) == (torch.float16, [1, 1, 1, 1])


def test_too_little_host_memory_is_said_before_training(caplog: pytest.LogCaptureFixture) -> None:
    from ds_hf.config import load_config
    from ds_hf.config.plan import plan_states
    from ds_hf.engine.optim import offloading
    from ds_hf.engine.optim.store import HostSettings

    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    plan = plan_states(load_config({"bf16": {"enabled": True}, "zero_optimization": zero}, check_batch=False))
    offloading._look_for_memory(HostSettings(numel=10**6), plan)
    assert not caplog.records
    offloading._look_for_memory(HostSettings(numel=10**13, accumulates=True), plan)
    assert "offload needs about 167638 GiB of host memory (1 processes)" in caplog.text  # 18 bytes each
