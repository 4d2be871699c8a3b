"""Checkpoints where states are offloaded: any setting continues any other, and faults leave the last one usable."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf import Engine, initialize
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.engine.optim.stepping import UnitsJob
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import DsHfError, OffloadError
from tests.contract.test_parity import ADAMW, CLIP, MICRO, batches, model
from tests.engine.offload.test_aio import files_of_at_most
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.logs import Lines

HALF, ALL = 3, 6


def engine_of(folder: str, how: str) -> Engine:
    """A stage-3 engine in bf16 that keeps its states as ``how`` says."""
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder, "buffer_count": 3}
    zero, own = {
        "none": ({}, {}),
        "host": ({"offload_optimizer": cpu, "stage": 2}, {}),
        "cpu": ({"offload_optimizer": {**cpu, "ratio": 0.5}, "offload_param": cpu}, {}),
        "streamed": ({"offload_optimizer": cpu}, {"stream": 1.0}),
        "delayed": ({"offload_optimizer": cpu, "offload_param": cpu}, {"delayed": True}),
        "delayed on the device": ({"offload_optimizer": cpu, "stage": 2}, {"delayed": True}),
        "nvme": ({"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}}, {}),
    }[how]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": 3, **zero},
        "ds_hf": {"offload": own, "checkpoint": {"verify": "full"}},
    }
    return initialize(model=model(), config=config)[0]


def steps(engine: Engine, first: int, last: int) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for (micro,) in batches(1, world)[first:last]:
        engine.backward(engine(micro[rank]))
        engine.step()


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    with GatheredParameters(engine.module.parameters()):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def uninterrupted(folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(folder, "none")
    steps(engine, 0, ALL)
    found = weights(engine)
    engine.destroy()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: Any) -> None:
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), (what, name)


def cross(folder: str) -> None:
    expected = uninterrupted(folder)
    for before, after in [
        ("none", "nvme"),
        ("nvme", "streamed"),
        ("streamed", "cpu"),
        ("cpu", "nvme"),
        ("nvme", "none"),
    ]:
        engine = engine_of(folder, before)
        steps(engine, 0, HALF)
        engine.save_checkpoint(f"{folder}/{before}-{after}")
        steps(engine, HALF, ALL)  # saving leaves no trace
        assert_equal(weights(engine), expected, before)
        engine.destroy()
        resumed = engine_of(folder, after)
        steps(resumed, 0, 1)  # states that the checkpoint replaces
        resumed.load_checkpoint(f"{folder}/{before}-{after}")
        steps(resumed, HALF, ALL)
        assert_equal(weights(resumed), expected, (before, after))
        resumed.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_every_setting_continues_every_other(world: int, tmp_path: Path) -> None:
    run_distributed(cross, world, str(tmp_path), timeout=110)


def killed_in_a_step(folder: str) -> None:
    engine = engine_of(folder, "nvme")
    steps(engine, 0, HALF)
    engine.save_checkpoint(f"{folder}/saved")
    flush, calls = SwapPool.flush, []

    def flush_and_die(pool: SwapPool, block: Any) -> None:
        calls.append(block)
        if len(calls) == 3:  # two units are a step ahead
            os.kill(os.getpid(), signal.SIGKILL)
        flush(pool, block)

    SwapPool.flush = flush_and_die  # type: ignore[method-assign]
    steps(engine, HALF, ALL)


def resume(folder: str) -> None:
    expected = uninterrupted(folder)
    left = [name for name in os.listdir(folder) if name.startswith("ds_hf_offload")]
    assert len(left) == 2  # of optimizer and parameters, by the process that was killed
    engine = engine_of(folder, "nvme")
    assert not [name for name in left if os.path.exists(f"{folder}/{name}")]
    engine.load_checkpoint(f"{folder}/saved")
    steps(engine, HALF, ALL)
    assert_equal(weights(engine), expected, "resumed")


def test_a_kill_in_a_step_loses_what_came_after_the_checkpoint_and_no_more(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure, match="died: exit code -9"):
        run_distributed(killed_in_a_step, 1, str(tmp_path), timeout=100)
    run_distributed(resume, 1, str(tmp_path), timeout=100)


def killed_beside_the_forward(folder: str) -> None:
    engine = engine_of(folder, "host")
    steps(engine, 0, HALF)
    engine.save_checkpoint(f"{folder}/saved")
    run, calls = UnitsJob._run, []

    def run_and_die(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        run(*args)

    UnitsJob._run = run_and_die  # type: ignore[method-assign]
    steps(engine, HALF, ALL)


def resume_on_the_host(folder: str) -> None:
    engine = engine_of(folder, "host")
    engine.load_checkpoint(f"{folder}/saved")
    steps(engine, HALF, ALL)
    assert_equal(weights(engine), uninterrupted(folder), "resumed")


def test_a_kill_while_the_cpu_updates_loses_no_more(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure, match="died: exit code -9"):
        run_distributed(killed_beside_the_forward, 1, str(tmp_path), timeout=100)
    run_distributed(resume_on_the_host, 1, str(tmp_path), timeout=100)


def two_kinds_of_files(folder: str) -> None:
    """Each kind would fit; both do not."""
    numel = sum(p.numel() for p in model().parameters())
    usage = shutil.disk_usage(folder)
    shutil.disk_usage = lambda path: usage._replace(free=13 * numel)  # type: ignore[assignment]
    with pytest.raises(OffloadError, match=r"GiB free, and offload needs"):
        engine_of(folder, "nvme")
    shutil.disk_usage = lambda path: usage._replace(free=15 * numel)  # type: ignore[assignment]
    engine_of(folder, "nvme")


def test_the_disk_must_hold_states_and_parameters_together(tmp_path: Path) -> None:
    run_distributed(two_kinds_of_files, 1, str(tmp_path), timeout=60)


def full_disk(folder: str) -> None:
    engine = engine_of(folder, "nvme")
    steps(engine, 0, HALF)
    engine.save_checkpoint(f"{folder}/saved")
    with files_of_at_most(4096), pytest.raises(OffloadError, match=r"ds_hf_offload.*\.bin cannot take"):
        steps(engine, HALF, ALL)
    with pytest.raises(DsHfError, match="the last step failed halfway"):
        engine.save_checkpoint(f"{folder}/saved")
    with pytest.raises(OffloadError, match=r"states were lost|cannot take"):
        steps(engine, HALF, ALL)
    engine.destroy()
    again = engine_of(folder, "nvme")
    again.load_checkpoint(f"{folder}/saved")
    steps(again, HALF, ALL)
    assert_equal(weights(again), uninterrupted(folder), "after the fault")


def test_a_full_disk_leaves_the_last_checkpoint_usable(tmp_path: Path) -> None:
    run_distributed(full_disk, 1, str(tmp_path), timeout=100)


def lost_file(folder: str) -> None:
    engine = engine_of(folder, "nvme")
    steps(engine, 0, 1)
    files = list(Path(folder).glob("ds_hf_offload_*/*.states.bin"))
    assert len(files) > 3  # more than there are in memory
    for path in files:
        path.unlink()
    with pytest.raises(OffloadError, match=r"ds_hf_offload_.*\.states\.bin is gone"):
        steps(engine, 1, ALL)


def test_a_file_that_is_removed_is_an_error_that_names_it(tmp_path: Path) -> None:
    run_distributed(lost_file, 1, str(tmp_path), timeout=100)


def delayed(folder: str) -> None:
    """A delayed run against plain arithmetic: each gradient is of weights that are one update old."""
    engine, plain = engine_of(folder, "delayed"), engine_of(folder, "none")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    steps(engine, 0, 1)
    assert_equal(weights(engine), weights(plain), "the first update is not synced yet")
    engine._finish_update()
    steps(plain, 0, 1)
    assert_equal(weights(engine), weights(plain), "now it is")
    (micro,) = batches(1, world)[1]
    stale = {name: value.clone() for name, value in weights(plain).items()}
    losses = []
    for each in (engine, plain):
        loss = each(micro[rank])
        losses.append(loss.item())
        each.backward(loss)
        each.step()
    assert losses[0] == losses[1]
    loss = engine(batches(1, world)[2][0][rank]).item()  # still with the weights before the second update
    assert_equal(weights(engine), stale, "stale")
    engine.save_checkpoint(f"{folder}/delayed")
    assert_equal(weights(engine), weights(plain), "a checkpoint has everything")
    assert loss != engine(batches(1, world)[2][0][rank]).item()
    resumed = engine_of(folder, "nvme")
    resumed.load_checkpoint(f"{folder}/delayed")
    assert_equal(weights(resumed), weights(plain), "resumed")
    for each in (engine, plain, resumed):
        each.destroy()


def written_while_updates_are_delayed(folder: str) -> list[bool]:
    """Whether a write is told of: after each step, of which the third alone follows one."""
    lines, told = Lines(logging.WARNING), []
    logging.getLogger("ds_hf").addHandler(lines)
    engine = engine_of(folder, "delayed on the device")
    for number in range(3):
        if number == 2:
            with torch.no_grad():
                next(engine.module.parameters()).mul_(0.5)
        steps(engine, number, number + 1)
        told.append(any("was written" in text for text in lines.texts))
    engine.destroy()
    return told


def test_what_is_told_of_writes_while_updates_are_delayed(tmp_path: Path) -> None:
    found = run_distributed(written_while_updates_are_delayed, 2, str(tmp_path), timeout=100)
    assert [any(each) for each in zip(*found, strict=True)] == [False, False, True]


def test_a_delayed_update_is_one_step_late_and_nothing_is_lost(tmp_path: Path) -> None:
    run_distributed(delayed, 2, str(tmp_path), timeout=100)


def destroyed(folder: str, how: str) -> dict[str, torch.Tensor]:
    """Weights after ``destroy`` while the last update goes on: those that the model computed with."""
    engine = engine_of(folder, how)
    steps(engine, 0, HALF)
    before = weights(engine)
    engine.destroy()
    assert_equal(weights(engine), before, "destroyed")
    return before


@pytest.mark.parametrize("how", ["delayed", "delayed on the device"])
def test_an_engine_destroyed_amid_a_delayed_update(tmp_path: Path, how: str) -> None:
    """Each rank had its own part of that update, by moments that might be gone."""
    first, second = run_distributed(destroyed, 2, str(tmp_path), how, timeout=100)
    assert_equal(first, second, "of both ranks")


def dropped(stage: int) -> dict[str, torch.Tensor]:
    """Weights after five updates, of which gradients came down that none of them took."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "ds_hf": {"offload": {"delayed": True}, "nonfinite": "skip"},
    }
    engine = initialize(model=model(), config=config)[0]
    for number, (micro,) in enumerate(batches(1, world)):
        if number == 2:
            engine.backward(engine(micro[rank]) * torch.inf)
            engine.step()
        if number == 4:
            engine.backward(engine(micro[rank]) * 100)
            engine.optimizer.zero_grad()
        engine.backward(engine(micro[rank]))
        engine.step()
    assert engine.skipped_steps == 1
    engine._finish_update()
    found = weights(engine)
    engine.destroy()
    return found


def one_step_late(world: int) -> dict[str, torch.Tensor]:
    """The same in plain torch: an update's weights come when the next one begins."""
    now, masters = model(), model()
    optimizer = torch.optim.AdamW(masters.parameters(), **ADAMW)  # type: ignore[arg-type]
    for (micro,) in batches(1, world):
        now.zero_grad()
        (sum(now(each) for each in micro) / world).backward()
        now.load_state_dict(masters.state_dict())
        for master, param in zip(masters.parameters(), now.parameters(), strict=True):
            master.grad = param.grad.clone()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), CLIP)
        optimizer.step()
    return dict(masters.named_parameters())


def test_gradients_that_are_dropped_leave_a_delayed_update_alone() -> None:
    """Its weights wait where its gradients came: an overflow let the next gradients come there."""
    expected = one_step_late(2)
    for stage in (1, 3):
        for found in run_distributed(dropped, 2, stage):
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight.detach(), rtol=1e-6, atol=1e-6, msg=name)
