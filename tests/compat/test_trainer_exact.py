"""A Trainer that stops and goes on is one that never stopped, bit for bit; and what it keeps on disk meanwhile."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, trainer_utils
from transformers.trainer import get_last_checkpoint

import ds_hf.engine.checkpoint.background as background
from ds_hf.errors import CheckpointError
from ds_hf.hf.resuming import unfinished
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config, history, make_trainer, tiny_llama

BACKGROUND = {"ds_hf": {"checkpoint": {"async": True}}}


def run(
    folder: Path, stage: int, steps: int, stop: int, resume: bool, more: dict[str, Any], **arguments: Any
) -> list[dict[str, float]]:
    """With dropout, shuffling and a schedule: everything that a resumed run can get wrong."""
    trainer = make_trainer(
        folder,
        config(stage, **more),
        trainer_arguments={"model": tiny_llama(attention_dropout=0.1)},
        max_steps=steps,
        save_strategy="steps",
        save_steps=stop,
        lr_scheduler_type="cosine",
        warmup_steps=stop // 2,
        gradient_accumulation_steps=2,
        **arguments,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(str(folder / "final"))
    return history(trainer)


def both_halves(folder: Path, stage: int, steps: int, more: dict[str, Any]) -> list[list[dict[str, float]]]:
    """The run that saves in the middle and at the end; the second half again."""
    straight = run(folder, stage, steps, steps // 2, False, more)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder / f"checkpoint-{steps}")
        (folder / "final").rename(folder / "straight")
    torch.distributed.barrier()
    torch.manual_seed(77)
    return [straight, run(folder, stage, steps, steps // 2, True, more)]


def assert_same_bits(folder: Path, results: Any, steps: int) -> None:
    for straight, resumed in results:
        assert len(straight) == steps
        assert resumed == straight  # the log is in the checkpoint
        assert len({row["loss"] for row in straight}) > steps // 2
    models = [AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("straight", "final")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.feature("Trainer", "n steps straight equal n/2, resume, n/2, bit for bit", pain="P22")
@pytest.mark.skipif(torch.cuda.is_available(), reason="sums on a GPU have no fixed order")
@pytest.mark.parametrize(("stage", "more"), [(2, {}), pytest.param(3, BACKGROUND, marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_straight(tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    assert_same_bits(tmp_path, run_user_code(both_halves, tmp_path, stage, 20, more), 20)


def grouped(folder: Path) -> list[list[dict[str, float]]]:
    """Stopped inside the first epoch, whose order was drawn from the random states at its start."""
    more = {"train_sampling_strategy": "group_by_length"}
    straight = run(folder, 1, 4, 2, False, {}, **more)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint-4")
    torch.distributed.barrier()
    return [straight, run(folder, 1, 4, 2, True, {}, **more)]


def test_samples_that_are_grouped_by_length_go_on_in_their_order(tmp_path: Path) -> None:
    for straight, resumed in run_user_code(grouped, tmp_path):
        assert resumed == straight


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="sums on a GPU have no fixed order")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 3])
def test_stopped_and_resumed_is_straight_at_length(tmp_path: Path, stage: int) -> None:
    assert_same_bits(tmp_path, run_user_code(both_halves, tmp_path, stage, 200, {}, timeout=500), 200)


# -- pruning --------------------------------------------------------------------------------------------------------


def limited(folder: Path, limit: int) -> tuple[list[list[str]], list[str], list[str]]:
    """With a writer that takes its time: checkpoints that load when one is removed, each time; and those at the end."""
    write, remove = background.write_part, shutil.rmtree

    def slowly(place: Path, part: Any) -> Any:
        time.sleep(0.3)
        return write(place, part)

    def loadable() -> list[str]:
        return sorted(path.name for path in folder.glob("checkpoint-*") if not unfinished(path))

    removed: list[list[str]] = []

    def look(path: str | Path, *args: Any, **kwargs: Any) -> None:
        remove(path, *args, **kwargs)
        if Path(path).name.startswith("checkpoint-"):
            removed.append(loadable())

    background.write_part, shutil.rmtree = slowly, look
    trainer = make_trainer(
        folder, config(2, **BACKGROUND), max_steps=8, save_strategy="steps", save_steps=2, save_total_limit=limit
    )
    trainer.train(resume_from_checkpoint=True if any(folder.glob("checkpoint-*")) else None)
    at_once = loadable()
    background.write_part, shutil.rmtree = write, remove
    return removed, at_once, sorted(path.name for path in folder.glob("checkpoint-*"))


def limited_twice(folder: Path) -> list[Any]:
    """Again after a run that was killed while it saved: the newest checkpoint is not the last whole one."""
    found = [limited(folder, 1)]
    torch.distributed.barrier()  # the other rank still looks at what there is
    if torch.distributed.get_rank() == 0:
        state = json.loads((folder / "checkpoint-8/trainer_state.json").read_text())
        (folder / "checkpoint-8/trainer_state.json").write_text(json.dumps({**state, "global_step": 5}))
        (folder / "checkpoint-8").rename(folder / "checkpoint-5")
        (folder / "checkpoint-7").mkdir()
    torch.distributed.barrier()
    assert trainer_utils.get_last_checkpoint(str(folder)) == str(folder / "checkpoint-5")
    return [*found, limited(folder, 1)]


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`save_total_limit` with checkpoints written in the background")
def test_pruning_never_takes_the_only_whole_checkpoint(tmp_path: Path) -> None:
    first, second = run_user_code(limited_twice, tmp_path)[0]
    for removed, at_once, left in (first, second):
        assert len(removed) == 3
        assert [] not in removed
        assert at_once == left == ["checkpoint-8"]
    assert first[0] == [["checkpoint-4"], ["checkpoint-6"], ["checkpoint-8"]]


@pytest.mark.slow
def test_pruning_to_two(tmp_path: Path) -> None:
    removed, at_once, left = run_user_code(limited, tmp_path, 2)[0]
    assert removed == [["checkpoint-4", "checkpoint-6"], ["checkpoint-6", "checkpoint-8"]]
    assert at_once == left == ["checkpoint-6", "checkpoint-8"]


def saved(folder: Path) -> None:
    make_trainer(folder, config(2), max_steps=3, save_strategy="steps", save_steps=1).train()


def resumed(folder: Path, checkpoint: str) -> list[str]:
    """What is told or raised when training goes on from it."""
    told: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(heard)
    trainer = make_trainer(folder / "out", config(2), max_steps=3)
    try:
        names = checkpoint.split(" or ")  # processes may be given different ones
        trainer.train(resume_from_checkpoint=str(folder / names[trainer.args.process_index % len(names)]))
    except CheckpointError as error:
        told.append(f"refused: {error}")
    logging.getLogger("ds_hf").removeHandler(heard)
    return told


def resumed_from_each(folder: Path, *checkpoints: str) -> list[list[str]]:
    return [resumed(folder, checkpoint) for checkpoint in checkpoints]


def test_interrupted_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_user_code(saved, tmp_path)
    one, two, three = (tmp_path / f"checkpoint-{step}" for step in (1, 2, 3))
    assert get_last_checkpoint(str(tmp_path)) == str(three)
    schedule = three / "scheduler.pt"
    whole = schedule.read_bytes()
    schedule.write_bytes(whole[: len(whole) // 2])
    assert get_last_checkpoint(str(tmp_path)) == str(two)
    schedule.write_bytes(whole)
    (three / "trainer_state.json").unlink()
    with caplog.at_level(logging.WARNING, "ds_hf"):
        assert get_last_checkpoint(str(tmp_path)) == str(two)
    assert "checkpoint-3: it has no trainer_state.json" in caplog.text
    (two / "global_step2").rename(two / ".global_step2.saving-host-1-0123456789ab")
    with caplog.at_level(logging.WARNING, "ds_hf"):
        assert get_last_checkpoint(str(tmp_path)) == str(one)
    assert "checkpoint-2: what the engine writes is not in it" in caplog.text
    shutil.rmtree(two / ".global_step2.saving-host-1-0123456789ab")  # killed before it had begun
    assert get_last_checkpoint(str(tmp_path)) == str(one)
    tensors = one / "global_step1/rank_00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert get_last_checkpoint(str(tmp_path)) == str(one)  # whose save had ended: the load says what is wrong with it
    manifest = json.loads((one / "global_step1/manifest.json").read_text())
    assert manifest["files"]["rank_00000.safetensors"] == tensors.stat().st_size + 1
    tensors.unlink()
    assert "is missing: the checkpoint is incomplete" in unfinished(one)
    (one / "latest").unlink()  # killed before it was written, by a save in the background
    assert get_last_checkpoint(str(tmp_path)) is None
    (one / "latest").write_text("global_step1")
    (one / "trainer_state.json").write_text("")
    assert get_last_checkpoint(str(tmp_path)) is None  # no save had ended: a script begins anew


def test_the_trainers_own_files_are_whole_and_of_one_save(tmp_path: Path) -> None:
    """Damaged, missing, or of another step: refused by name on all processes, or told."""
    run_user_code(saved, tmp_path)
    two, three = tmp_path / "checkpoint-2", tmp_path / "checkpoint-3"

    def spoilt(name: str, file: str, content: bytes | None) -> str:
        shutil.copytree(two, tmp_path / name)
        (tmp_path / name / file).unlink()
        if content is not None:
            (tmp_path / name / file).write_bytes(content)
        return name

    random = (two / "rng_state_1.pth").read_bytes()
    names = [
        spoilt("state", "trainer_state.json", b'{"global_step": 2, "epo'),
        spoilt("schedule", "scheduler.pt", b""),
        spoilt("random", "rng_state_1.pth", random[:1000] + bytes([random[1000] ^ 4]) + random[1001:]),
        spoilt("lacking", "scheduler.pt", None),
        spoilt("later", "trainer_state.json", (three / "trainer_state.json").read_bytes()),
        spoilt("faster", "scheduler.pt", (three / "scheduler.pt").read_bytes()),
        "checkpoint-2",
        "checkpoint-2 or nowhere",
    ]
    for rank, told in enumerate(run_user_code(resumed_from_each, tmp_path, *names)):
        for name, file in zip(
            names[:4], ("trainer_state.json", "scheduler.pt", "rng_state_1.pth", "scheduler.pt"), strict=True
        ):
            (text,) = told[names.index(name)]
            assert text.startswith(f"refused: {tmp_path / name} is not resumed from: {tmp_path / name / file} ")
        if rank == 0:
            (text,) = told[4]
            assert "trainer_state.json was written after step 3, and the engine's files after 2" in text
            (text,) = told[5]
            assert "scheduler.pt is at learning rates [0.0" in text
        assert told[6] == []
        (text,) = told[7]
        assert text.startswith(f"refused: {tmp_path}")
        assert "is not resumed from: process 1 does not find it" in text
