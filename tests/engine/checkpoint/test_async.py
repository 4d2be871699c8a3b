"""Checkpoints written in the background: what is saved is the moment of the call, and a failure reaches every rank."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.checkpoint.verify import verify
from ds_hf.engine.checkpoint import background
from ds_hf.engine.checkpoint.background import HostCopy
from ds_hf.engine.checkpoint.contents import gather_part, write_part
from ds_hf.engine.checkpoint.holders import find_holders
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import build, config, differences, engine_of, states, train
from tests.helpers.distributed import run_distributed

ASYNC = {"ds_hf": {"checkpoint": {"async": True}}}


class Gate:
    """Stands in for ``write_part``: writes once it is opened, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.failure = failure

    def __call__(self, folder: Path, part: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(600)
        if self.failure is not None:
            raise self.failure
        return write_part(folder, part)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(background, "write_part", gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def engine() -> Iterator[Any]:
    with engine_of(config(2, **ASYNC)) as built:
        train(built, 2)
        yield built


def test_what_is_saved_is_the_moment_of_the_call(engine: Any, tmp_path: Path, gate: Gate) -> None:
    before = states(engine)
    torch.manual_seed(5)
    engine.save_checkpoint(tmp_path, client_state={"which": 1})
    expected = torch.rand(3)
    assert gate.reached.wait(600)
    train(engine, 3, 10)
    engine.module.blocks[0].mean.fill_(7)
    assert not (tmp_path / "latest").exists()
    gate.opened.set()
    engine.wait_for_checkpoint()
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert verify(tmp_path) == []
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "global_step2"), {"which": 1})
    assert differences(before, states(engine)) == []
    assert torch.equal(torch.rand(3), expected)


def _save_both_ways(folder: Path) -> list[tuple[list[str], list[str]]]:
    """Names of the files whose content differs, and of all; for several layouts."""
    found = []
    for stage, dtype in ((0, "bf16"), (1, "fp32"), (2, "bf16offload"), (3, "fp16")):
        place = folder / f"{stage}{dtype}"
        with engine_of(config(stage, dtype)) as engine:
            train(engine, 2)
            engine.save_checkpoint(place / "now", tag="t")
            settings = engine.settings.ds_hf.checkpoint
            object.__setattr__(settings, "async_", True)
            engine.save_checkpoint(place / "later", tag="t")
            object.__setattr__(settings, "async_", False)
            engine.wait_for_checkpoint()
        names = sorted(path.name for path in (place / "now/t").iterdir() if path.name != "manifest.json")
        assert names == sorted(path.name for path in (place / "later/t").iterdir() if path.name != "manifest.json")
        same = [(place / "now/t" / name).read_bytes() == (place / "later/t" / name).read_bytes() for name in names]
        manifests = [json.loads((place / way / "t/manifest.json").read_text()) for way in ("now", "later")]
        for manifest in manifests:
            manifest.pop("written_at")
            manifest.pop("checksum", None)
        found.append(([n for n, s in zip(names, same, strict=True) if not s], names))
        assert manifests[0] == manifests[1]
    return found


def test_files_are_the_same_as_those_of_a_synchronous_save(tmp_path: Path) -> None:
    for rank in run_distributed(_save_both_ways, 2, tmp_path):
        for different, names in rank:
            assert different == []
            assert len(names) >= 5


def test_saving_again_waits_for_the_former(engine: Any, tmp_path: Path, gate: Gate) -> None:
    engine.save_checkpoint(tmp_path, tag="one")
    timer = threading.Timer(0.3, gate.opened.set)
    timer.start()
    began = time.monotonic()
    engine.save_checkpoint(tmp_path, tag="two")
    assert time.monotonic() - began > 0.25
    assert (tmp_path / "one/manifest.json").exists()
    assert (tmp_path / "latest").read_text() in ("one", "two")  # the gate is open for the second one too
    engine.wait_for_checkpoint()
    assert (tmp_path / "latest").read_text() == "two"


def test_loading_waits_for_the_write(engine: Any, tmp_path: Path, gate: Gate) -> None:
    engine.save_checkpoint(tmp_path, tag="one")
    threading.Timer(0.2, gate.opened.set).start()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "one")


def test_destroy_waits_for_the_write(tmp_path: Path, gate: Gate) -> None:
    engine = build(config(2, **ASYNC))
    engine.save_checkpoint(tmp_path, tag="one")
    threading.Timer(0.2, gate.opened.set).start()
    engine.destroy()
    assert verify(tmp_path) == []


def test_the_host_copy_is_used_again(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="one")
    place = engine.checkpoint_writer._copy.memory.data_ptr()
    engine.save_checkpoint(tmp_path, tag="two")
    assert engine.checkpoint_writer._copy.memory.data_ptr() == place
    assert engine.checkpoint_writer._copy.memory.numel() == _nbytes(engine)
    engine.destroy()
    assert engine.checkpoint_writer._copy.memory is None


def _nbytes(engine: Any) -> int:
    return sum(entry.nbytes for entry in gather_part(engine, find_holders(engine), None, False).entries.values())


def test_times_are_told(engine: Any, tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_hf"):
        began = time.monotonic()
        engine.save_checkpoint(tmp_path)
        returned = time.monotonic() - began
        time.sleep(0.3)
        gate.opened.set()
        engine.wait_for_checkpoint()
    times = engine.checkpoint_writer.times
    assert times.blocked <= returned
    assert times.written > 0.3
    assert times.nbytes > _nbytes(engine)
    assert f"saved {tmp_path / 'global_step2'} in the background: {times}" in caplog.text
    assert f"blocked {times.blocked:.3f} s" in str(times)


# -- failures -------------------------------------------------------------------------------------------------------


def _step(engine: Any, folder: Path) -> None:
    train(engine, 1)


def _save(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, tag="next")


def _load(engine: Any, folder: Path) -> None:
    engine.load_checkpoint(folder)


def _wait(engine: Any, folder: Path) -> None:
    engine.wait_for_checkpoint()


def _destroy(engine: Any, folder: Path) -> None:
    engine.destroy()


@pytest.mark.parametrize("call", [_step, _save, _load, _wait, _destroy])
def test_a_failure_surfaces_at_the_next_call(tmp_path: Path, gate: Gate, call: Any) -> None:
    engine = build(config(2, **ASYNC))
    gate.opened.set()
    engine.save_checkpoint(tmp_path, tag="good", client_state={"which": 1})
    engine.wait_for_checkpoint()
    gate.failure = OSError(28, "No space left on device")
    engine.save_checkpoint(tmp_path, tag="good", client_state={"which": 2})
    engine.checkpoint_writer._thread.join()
    with pytest.raises(CheckpointError, match=r"in the background is lost: .*good failed on rank 0: .*No space"):
        call(engine, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    gate.failure = None
    if call is not _destroy:  # once; then everything goes on
        assert engine.load_checkpoint(tmp_path)[1] == {"which": 1}
        engine.save_checkpoint(tmp_path, tag="good", client_state={"which": 3})
        assert engine.load_checkpoint(tmp_path)[1] == {"which": 3}
        engine.destroy()
    assert verify(tmp_path) == []


def _one_rank_fails(folder: Path, who: int, call: str) -> tuple[list[str], int, list[str]]:
    engine = build(config(2, **ASYNC))
    rank = engine.axis.rank
    train(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    engine.wait_for_checkpoint()
    gate = Gate(OSError(28, "No space left on device") if rank == who else None)
    background.write_part = gate
    engine.save_checkpoint(folder, tag="good")
    steps, messages = 0, []
    if call == "step":
        for number in range(60):
            if number == 3:
                gate.opened.set()
            try:
                train(engine, 1, number)
                steps += 1
            except CheckpointError as error:
                messages.append(str(error))
            time.sleep(0.01 * rank)
    else:
        gate.opened.set()
        try:
            engine.destroy()
        except CheckpointError as error:
            messages.append(str(error))
    background.write_part = write_part  # this process belongs to the test alone
    faults = verify(folder)
    engine.destroy()
    return messages, steps, faults


@pytest.mark.parametrize(
    ("who", "call"), [(0, "step"), pytest.param(1, "step", marks=pytest.mark.slow), (1, "destroy")]
)
def test_a_failure_on_one_rank_surfaces_on_all_at_the_same_step(tmp_path: Path, who: int, call: str) -> None:
    first, second = run_distributed(_one_rank_fails, 2, tmp_path, who, call, timeout=60)
    for messages, _, faults in (first, second):
        assert len(messages) == 1
        assert f"good failed on rank {who}: OSError: [Errno 28] No space left on device" in messages[0]
        assert faults == []
    assert first[1] == second[1]
    assert call == "destroy" or first[1] == 59


def _train_while_writing(folder: Path) -> tuple[list[float], list[float], int]:
    """Losses while nothing is written and while something always is, with a hang watch of three seconds."""
    losses = []
    count = 0
    for content in (config(3), config(3, ds_hf={"hang_timeout": 3.0, "checkpoint": {"async": True}})):
        engine = build(content)
        rank = engine.axis.rank

        def slowly(place: Path, part: Any, rank: int = rank) -> Any:
            time.sleep(4.0 * rank)  # longer than the watch waits
            return write_part(place, part)

        background.write_part = slowly
        losses.append([])
        for step in range(12):
            losses[-1] += train(engine, 1, step)
            if len(losses) == 2 and step in (1, 4):
                engine.save_checkpoint(folder)
                count += 1
        engine.destroy()
    background.write_part = write_part
    return losses[0], losses[1], count


def test_training_goes_on_unchanged_and_the_watch_is_quiet(tmp_path: Path) -> None:
    for quiet, busy, count in run_distributed(_train_while_writing, 2, tmp_path, timeout=60):
        assert count == 2
        assert busy == quiet
        assert len(busy) == 12
    assert (tmp_path / "latest").read_text() == "global_step5"
    assert verify(tmp_path) == verify(tmp_path, tag="global_step2") == []


def _others_are_waited_for(folder: Path) -> bool:
    """``save_checkpoint`` in a rank that is ready early does not complete what another has not written."""
    engine = build(config(2, **ASYNC))
    gate = Gate()
    if engine.axis.rank == 1:
        background.write_part = gate
    engine.save_checkpoint(folder)
    time.sleep(0.5)
    early = (folder / "latest").exists()
    gate.opened.set()
    engine.wait_for_checkpoint()
    background.write_part = write_part
    engine.destroy()
    return early


def test_latest_waits_for_all_ranks(tmp_path: Path) -> None:
    assert run_distributed(_others_are_waited_for, 2, tmp_path) == [False, False]
    assert verify(tmp_path) == []


SCRIPT = """
import sys, time
import torch
import ds_hf
from ds_hf.engine.checkpoint import background
write = background.write_part
def slowly(folder, part):
    time.sleep(1.0)
    return write(folder, part)
background.write_part = slowly
model = torch.nn.Linear(4, 4)
engine, *_ = ds_hf.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "ds_hf": {"checkpoint": {"async": True}},
})
engine.save_checkpoint(sys.argv[1], tag="last")
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("raise", 3)])
def test_the_interpreter_does_not_end_before_the_files_are_whole(tmp_path: Path, ending: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), ending], capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    assert (tmp_path / "latest").read_text() == "last"
    assert verify(tmp_path) == []


def test_host_copy_of_everything(engine: Any) -> None:
    """What is copied is what would be written, also where a moment lies in several segments."""
    part, copied = (
        gather_part(engine, find_holders(engine), None, False),
        gather_part(engine, find_holders(engine), None, False),
    )
    HostCopy().take(copied)
    assert sorted(part.entries) == sorted(copied.entries)
    for key, entry in part.entries.items():
        value, copy = entry.source.value(), copied.entries[key].source.value()
        assert torch.equal(value.cpu(), copy)
        assert value.dtype == copy.dtype
        assert value.numel() == 0 or value.data_ptr() != copy.data_ptr()
        assert copied.entries[key].stretches == entry.stretches
    assert len(part.entries) > 10
