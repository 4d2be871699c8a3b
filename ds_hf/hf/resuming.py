"""What a Trainer or an Accelerator resumes from: a checkpoint that is whole, and whose files are of one save.

``checkpoint-N`` exists before all of it is there, and beside what the engine writes, which has checksums, lie files of
the client: its state, a schedule and random states. ``torch.load`` and ``json`` say of a damaged one neither which it
is nor what to do, and a file of another save would go unnoticed.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hf.hf.loss import Args, Kwargs, Wrapped, engine_of
from ds_hf.log import logger

__all__ = [
    "check_resumed",
    "compare_with_engine",
    "keep_random_states",
    "load_every_engine",
    "load_whole_state",
    "pass_over_unfinished",
    "unfinished",
]

STATE, SCHEDULE = "trainer_state.json", "scheduler.pt"


def pass_over_unfinished(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around ``get_last_checkpoint``: the last one that is whole; none, if no save had come to its end."""
    newest = wrapped(*args, **kwargs)
    if newest is None:
        return None
    root = Path(newest).parent
    if not (_deepspeed_trains() or any(root.glob("checkpoint-*/*global_step*"))):
        return newest
    folders = [path for path in root.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    ended = []
    for path in sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        fault = unfinished(path)
        if not fault:
            return str(path)
        logger.warning("not resuming from %s: %s", path, fault)
        if _ended(path):
            ended.append(path)
    return str(ended[0]) if ended else None  # loading it says what is wrong with it


def _deepspeed_trains() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _ended(folder: Path) -> bool:
    """Whether the save had come to its end, so that there was something which is damaged now."""
    from ds_hf.checkpoint.formats import named_by_latest

    state, named = folder / STATE, named_by_latest(folder) is not None or not any(folder.glob("*global_step*"))
    return named and state.is_file() and state.stat().st_size > 0 and not _lacks_engine(folder)


def _lacks_engine(folder: Path) -> bool:
    """Whether what the engine writes is not there yet. A ``save_only_model`` has no random states either; another
    library's optimizer lies there as a file."""
    if any(path for path in folder.glob("*global_step*") if not path.name.startswith(".")):
        return False
    begun = any(folder.glob("*global_step*")) or any(folder.glob("rng_state*.pth"))
    return begun and not any(folder.glob("optimizer*"))


def unfinished(folder: Path) -> str:
    """What a Trainer's checkpoint lacks to resume from it."""
    from ds_hf.checkpoint.format import MANIFEST
    from ds_hf.checkpoint.formats import named_by_latest
    from ds_hf.checkpoint.places import find_folder
    from ds_hf.checkpoint.verify import quick_faults
    from ds_hf.errors import CheckpointError

    fault = _own_fault(folder)
    if fault:
        return fault
    if _lacks_engine(folder):
        return "what the engine writes is not in it: its saving was interrupted"
    if not any(folder.glob("*global_step*")):
        return ""  # save_only_model: the Trainer says itself that there is nothing to resume from
    named = named_by_latest(folder)
    if named is None:
        tag = next(path.name for path in folder.glob("*global_step*"))
        return f"it has no file 'latest': its saving was interrupted. If {tag} in it is whole, write that name there"
    try:
        place = find_folder(folder, latest=named)
    except CheckpointError as error:
        return str(error)
    ours = (place / MANIFEST).is_file() or any(place.glob("rank_*.safetensors")) or not any(place.glob("*_states.pt"))
    return next(iter(quick_faults(place)), "") if ours else ""


def _own_fault(folder: Path, rank: int | None = None) -> str:
    """What is wrong with the Trainer's own files; of random states those of ``rank``, or of a single process."""
    from ds_hf.regular_files import read_object

    state = folder / STATE
    if not state.is_file():
        return f"it has no {STATE}: its saving was interrupted"
    try:
        read_object(state)
    except (OSError, ValueError) as error:
        return f"{state} cannot be read: {getattr(error, 'strerror', None) or error}"
    names = [SCHEDULE] if rank is None else [SCHEDULE, "rng_state.pth", f"rng_state_{rank}.pth"]
    return _damaged([folder / name for name in names])


def _damaged(paths: Iterable[Path]) -> str:
    """What is wrong with the first pickled file that is."""
    from ds_hf.checkpoint.trust.pickled import check_pickled
    from ds_hf.errors import CheckpointError

    try:
        for path in paths:
            if os.path.lexists(path):
                check_pickled(path)
    except CheckpointError as error:
        return str(error)
    return ""


def check_resumed(trainer: Any, given: Any) -> Any:
    """Before ``Trainer.train``: the Trainer's files in what it resumes from can be read, on each process.

    Args:
        given: ``resume_from_checkpoint``.

    Returns:
        the same, or the last checkpoint where it is ``True``.

    Raises:
        CheckpointError: one cannot, on whatever process.
    """
    if trainer.args.deepspeed_plugin is None:
        return given
    if not given:
        _tell_of_what_is_not_handed_on(trainer)
        return given
    if given is True:
        found: Any = importlib.import_module("transformers.trainer")
        given = found.get_last_checkpoint(trainer.args.output_dir) or given
    folder = None if given is True else Path(given)
    there = folder is not None and folder.is_dir()
    fault = _own_fault(Path(given), trainer.args.process_index) if there else None
    _agree(trainer.args.output_dir if folder is None else folder, fault)
    return given


def _tell_of_what_is_not_handed_on(trainer: Any) -> None:
    """``--resume_from_checkpoint`` is an argument that transformers parses and does not use: a script that calls
    ``train()`` without it begins anew, and writes over the checkpoints that were to be resumed from."""
    asked = getattr(trainer.args, "resume_from_checkpoint", None)
    text = str(asked or False).lower()
    if trainer.state.global_step > 0 or trainer.args.process_index > 0 or text in ("false", "none", "no", "0"):
        return
    found: Any = importlib.import_module("transformers.trainer")
    folder = Path(trainer.args.output_dir)
    if text == "true" and not (folder.is_dir() and found.get_last_checkpoint(str(folder))):
        return  # the first start of a script that looks for the last one itself
    logger.warning(
        "--resume_from_checkpoint %s is not followed: the script calls train() without it, so training begins anew. "
        "Hand it on: trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)",
        asked,
    )


def _agree(folder: Any, fault: str | None) -> None:
    """Raise what any process has found wrong; ``None``: it has no such folder, which is said where others have one.
    Collective."""
    from ds_hf.errors import CheckpointError

    faults = [fault]
    if dist.is_initialized() and dist.get_world_size() > 1:
        faults *= dist.get_world_size()
        dist.all_gather_object(faults, fault)
    if any(each is not None for each in faults):
        faults = [f"process {rank} does not find it" if each is None else each for rank, each in enumerate(faults)]
    for each in filter(None, faults):
        raise CheckpointError(_refused(folder, each))


def _refused(folder: Any, fault: str) -> str:
    return f"{folder} is not resumed from: {fault}. Copy it again, or give another checkpoint"


def compare_with_engine(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around ``_load_optimizer_and_scheduler``, when the engine has its states: tells of files of another save."""
    checkpoint, engine = args[0] if args else kwargs.get("checkpoint"), engine_of(trainer)
    if checkpoint is None or engine is None:
        return wrapped(*args, **kwargs)
    from ds_hf.errors import CheckpointError
    from ds_hf.regular_files import read_object

    folder = Path(checkpoint)
    try:
        found = wrapped(*args, **kwargs)
    except FileNotFoundError as error:  # on all processes alike; who has a schedule of DeepSpeed's has no such file
        raise CheckpointError(_refused(folder, f"{error.filename} is missing")) from None
    step = read_object(folder / STATE).get("global_step")
    if step != engine.global_steps:
        _tell(f"{folder / STATE} was written after step {step}, and the engine's files after {engine.global_steps}")
    if (folder / SCHEDULE).is_file() and engine.optimizer is not None:
        _compare_rates(folder / SCHEDULE, trainer.lr_scheduler, engine.optimizer)
    if not (trainer.args.ignore_data_skip or engine.settings.data_efficiency.batches_by_tokens):  # the latter tells
        _compare_batches(engine)
    return found


def keep_random_states(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the Trainer's load of the engine: random states stay as they are.

    A sampler without a seed of its own (``group_by_length``) draws the order of the interrupted epoch after it, from
    the states of a run's start. The saved ones the Trainer brings back once it has passed over what was trained on.
    """
    from ds_hf.engine.checkpoint.live import random_states, restore_random_states

    before = random_states()
    found = wrapped(*args, **kwargs)
    restore_random_states(before)
    return found


def load_every_engine(wrapped: Wrapped, accelerator: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around ``Accelerator.load_state``: an engine whose states are not there, as in what was saved without DeepSpeed,
    has loaded nothing, which it only warns of."""

    def check(_: Any, given: Any) -> None:
        names = ["pytorch_model", *(f"pytorch_model_{number}" for number in range(1, len(accelerator._models)))]
        folders = [Path(given) / name for name in names[: len(accelerator._models)]]
        missing = [path for path in folders if not path.is_dir()]
        _agree(given, f"{missing[0]}, the engine's states, is missing" if missing else "")

    if not _deepspeed_trains():
        return wrapped(*args, **kwargs)
    hook = accelerator.register_load_state_pre_hook(check)
    try:
        return wrapped(*args, **kwargs)
    finally:
        hook.remove()


def load_whole_state(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around what accelerate's ``load_state`` loads when the engine has its states."""
    if not _deepspeed_trains():
        return wrapped(*args, **kwargs)
    given = dict(zip(("input_dir", "models", "optimizers", "schedulers"), args, strict=False)) | kwargs
    folder = Path(given["input_dir"])
    names = ["scheduler.bin", *(f"scheduler_{number}.bin" for number in range(1, len(given["schedulers"])))]
    paths = [folder / name for name in names[: len(given["schedulers"])]]
    missing = [f"{path} is missing" for path in paths if not os.path.lexists(path)]
    own = sorted(folder.glob("custom_checkpoint_*.pkl"))
    _agree(folder, missing[0] if missing else _damaged([*paths, *own]))
    found = wrapped(*args, **kwargs)
    for path, scheduler in zip(paths, given["schedulers"], strict=True):
        for optimizer in getattr(scheduler, "optimizers", [])[:1]:
            _compare_rates(path, scheduler, optimizer)
    return found


def _compare_batches(engine: Any) -> None:
    """The Trainer counts steps to find the place in its data, without DeepSpeed as well, where only a change of
    ``per_device_train_batch_size`` is told."""
    steps, samples, batch = engine.global_steps, engine.global_samples, engine.batch.train
    if steps and samples and round(samples / steps) != batch and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "the checkpoint's %d steps took %d samples, and the Trainer passes over %d, which as many steps take with "
            "a batch of %d: samples are %s. Resume with the batch of before, or with ignore_data_skip=True, which "
            "begins the epoch anew",
            *(steps, samples, steps * batch, batch, "seen twice" if steps * batch < samples else "never seen"),
        )


def _compare_rates(file: Path, scheduler: Any, optimizer: Any) -> None:
    rates = [float(rate) for rate in getattr(scheduler, "get_last_lr", list)()]
    held = [float(group["lr"]) for group in optimizer.param_groups]
    if len(rates) == len(held) and not all(map(_equal, rates, held)):
        _tell(f"{file} is at learning rates {rates}, and the engine's files at {held}")


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-30)


def _tell(difference: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "%s: unless your script sets that itself, the files are of different saves. Copy the checkpoint again, or "
            "resume from another one",
            difference,
        )
