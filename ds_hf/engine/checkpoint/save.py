"""Saving a checkpoint: all of it or nothing.

Order: agree on the tag -> every rank gathers its part -> rank 0 looks for room and clears leftovers away -> every rank
writes into a hidden folder beside the target -> rank 0 writes the manifest and renames the folder -> ``latest`` names
it. Until the rename nothing that was there before is touched, and a failure on any rank is raised on every rank.

With ``ds_hf.checkpoint.async`` the part is copied instead of written, and ``background`` does the rest.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path, PurePosixPath
from typing import Any

from ds_hf.checkpoint.commit import (
    announce,
    checked_tag,
    commit,
    hidden_beside,
    make_room,
)
from ds_hf.checkpoint.files import model_states_name
from ds_hf.checkpoint.holds import FolderHold, this_writer
from ds_hf.checkpoint.places import folder_of
from ds_hf.checkpoint.reports import RankReport
from ds_hf.engine.checkpoint.agreement import collect, together
from ds_hf.engine.checkpoint.background import SaveTimes, WriteJob
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict, save_16bit_model
from ds_hf.engine.checkpoint.contents import gather_part, write_part
from ds_hf.engine.checkpoint.describe import describe
from ds_hf.engine.checkpoint.holders import find_holders
from ds_hf.engine.checkpoint.live import Checkpointable, check_names, world_of
from ds_hf.errors import CheckpointError, CheckpointPlaceError
from ds_hf.log import logger, warn_once

__all__ = ["consolidated_state_dict", "save_16bit_model", "save_checkpoint"]

_OVERHEAD = 2**20  # bytes of manifest, headers and script of a small model; of a large one they do not count


def save_checkpoint(
    engine: Checkpointable,
    save_dir: str | Path,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write everything that training needs to go on into ``save_dir/tag``. All ranks call it.

    Args:
        tag: name of the checkpoint, default ``global_step{N}``.
        client_state: kept with it and given back by ``load_checkpoint``: rank 0's, to all ranks.
        save_latest: let the file ``latest`` name this checkpoint.
        exclude_frozen_parameters: leave out what no optimizer updates.

    Raises:
        CheckpointError: it could not be written whole, or the one before, in the background, could not; what was there
            before is as it was.
        CheckpointPlaceError: ``save_dir`` or ``tag`` cannot be one, on every rank; nothing was touched.
    """
    began = time.perf_counter()
    _tell_of_gradients(engine)
    engine.checkpoint_writer.wait()
    if engine.optimizer is not None:
        engine.optimizer.bring_together()
    axis = world_of(engine)
    wanted = f"global_step{engine.global_steps}" if tag is None else str(tag)
    tag, writer, first_dir = _agree(engine, save_dir, wanted)
    root, target = Path(save_dir), Path(save_dir) / tag
    staged, hold = hidden_beside(target, "saving", writer), None
    in_background = engine.settings.ds_hf.checkpoint.async_
    holders = find_holders(engine)
    holders.check(engine, f"saving {target}")
    try:
        with together(axis, f"saving {target}") as meeting:
            check_names(engine)
            part = gather_part(engine, holders, client_state, exclude_frozen_parameters)
            description = _describe(engine, tag, exclude_frozen_parameters)
            meeting.bring(part.nbytes)
        nbytes = sum(meeting.brought)
        with together(axis, f"saving {target}"):
            if axis.rank == 0:
                hold = _make_room(root, target, staged, nbytes)
            if in_background:
                engine.checkpoint_writer.take(part)
        staged = _where_it_is(staged, hidden_beside(Path(first_dir) / tag, "saving", writer))

        def finish(reports: list[RankReport]) -> None:
            commit(staged, target, description, reports)
            announce(root, tag, save_latest)
            if hold is not None:
                hold.close()

        job = WriteJob(part, staged, target, finish, began, SaveTimes(0.0, 0.0, nbytes))
        if in_background:
            job.times.blocked = time.perf_counter() - began
            engine.checkpoint_writer.start(job, engine.step_hooks)
        else:
            _write_now(engine, job)
    except BaseException:
        if axis.rank == 0 and not engine.checkpoint_writer.busy:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return True


def _tell_of_gradients(engine: Checkpointable) -> None:
    """Gradients are not saved; a loader of the engine's own goes back to the step's first micro-batch."""
    begun = engine.begun_micro_batches
    if begun and engine.training_dataloader is None:
        warn_once(
            f"a checkpoint was saved amid a step, of which {begun} of {engine.accumulation.steps} micro-batches were "
            "done (said once): gradients are not in it, so a run that loads it begins that step anew. Save after the "
            "engine.step() that updates, or let the data go back as far",
            about="checkpoints amid a step",
        )


def _agree(engine: Checkpointable, save_dir: str | Path, tag: str) -> tuple[str, str, str]:
    """Rank 0's tag, compared as ``checkpoint.tag_validation`` says and fit to be one, its writer and its folder."""
    mode = str(engine.settings.checkpoint.tag_validation).lower()
    answers = collect(world_of(engine), (tag, this_writer(), _place_fault(save_dir), str(save_dir)))
    tags = [answer[0] for answer in answers]
    for fault in [answer[2] for answer in answers]:
        if fault:
            raise CheckpointPlaceError(fault)
    if len(set(tags)) > 1 and mode != "ignore":
        message = f"the ranks want to save under different tags: {sorted(set(tags))}; give every rank the same tag"
        if mode == "fail":
            raise CheckpointError(message + ' (checkpoint.tag_validation is "Fail")')
        if world_of(engine).rank == 0:
            logger.warning("%s; %r of rank 0 is used", message, tags[0])
    return checked_tag(tags[0]), answers[0][1], answers[0][3]


def _where_it_is(own: Path, first: Path) -> Path:
    """The folder that rank 0 has made: under this rank's name of it, or else under rank 0's.

    Scripts put the time into ``save_dir`` on each rank for itself, and the ranks do not start in the same second.
    """
    if own == first or own.is_dir() or not first.is_dir():
        return own
    logger.warning("this rank saves in %s, as rank 0 does, and not in %s", first.parent, own.parent)
    return first


def _place_fault(save_dir: Any) -> str:
    try:
        folder_of(save_dir, "save_dir")
    except CheckpointPlaceError as error:
        return str(error)
    return ""


def _describe(engine: Checkpointable, tag: str, exclude_frozen: bool) -> dict[str, Any]:
    """Rank 0's knowledge of the whole."""
    if world_of(engine).rank != 0:
        return {}
    common_file = model_states_name(0, sharded=engine.plan.shards_parameters)
    return describe(engine, PurePosixPath(tag).name, common_file, exclude_frozen)


def _make_room(root: Path, target: Path, staged: Path, nbytes: int) -> FolderHold:
    """Rank 0: an empty folder to write to, on a disk with room for all ranks' parts."""
    if target.is_file():
        raise CheckpointPlaceError(f"{target} is a file: give another tag, or move it away")
    hold = make_room(staged, target, nbytes + _OVERHEAD, root)
    logger.info("saving %s: %.3f GB", target, nbytes / 1e9)
    return hold


def _write_now(engine: Checkpointable, job: WriteJob) -> None:
    """Write, and return when it is durable."""
    world = world_of(engine)
    with together(world, f"saving {job.target}"):
        report = write_part(job.staged, job.part)
    reports = collect(world, report)
    with together(world, f"saving {job.target}"):
        if world.rank == 0:
            job.finish(reports)
    job.times.blocked = job.times.written = time.perf_counter() - job.began
    engine.checkpoint_writer.times = job.times
    if world.rank == 0:
        logger.info("saved %s: %s", job.target, job.times)
