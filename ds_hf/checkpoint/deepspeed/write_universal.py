"""Writing an opened checkpoint as a universal one, which DeepSpeed loads at any stage and number of processes.

What each of DeepSpeed's loaders wants is there: at stages 1 and 2 it reads ``mp_rank_00_model_states.pt`` and the step
of each parameter, at stage 3 ``zero_pp_rank_0_mp_rank_00_model_states.pt`` and one step in the common file. Tensors are
whole; beside them stands how DeepSpeed's tensor-parallel ranks cut them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.commit import publish, stage
from ds_hf.checkpoint.convert import default_tag, state_bytes
from ds_hf.checkpoint.deepspeed.pickles import SubparamShape, save_pickled
from ds_hf.checkpoint.deepspeed.read_universal import LATEST, OPTIMIZER_STATE, STATES, WRITTEN_AS, is_universal
from ds_hf.checkpoint.deepspeed.slices import INFO, SliceRules
from ds_hf.checkpoint.deepspeed.write import (
    DEEPSPEED_VERSION,
    Target,
    flats_of,
    model_state,
    new_save,
    param_groups_of,
    scaler_state,
)
from ds_hf.checkpoint.files import model_states_name, replace_text
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.holds import sync
from ds_hf.checkpoint.places import folder_of
from ds_hf.checkpoint.scalars import newest, number
from ds_hf.checkpoint.source import Report, Source
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["default_universal_tag", "write_universal"]

_FILE_OF = {"master": "fp32"}


def default_universal_tag(source: Source) -> str:
    """As DeepSpeed's users name the folder beside that of the checkpoint."""
    return f"{default_tag(source)}_universal"


def write_universal(
    source: Source,
    folder: str | Path,
    *,
    strict: bool = True,
    workers: int = 1,
    report: Report | None = None,
) -> Path:
    """Write ``folder`` and let ``latest_universal`` beside it name it; a universal checkpoint there is replaced.

    Args:
        strict: patterns of ``universal_checkpoint_info`` that match no parameter are an error.
        workers: parameters that are in memory, and written, at a time.

    Raises:
        CheckpointError: the source has no optimizer states or is damaged, or ``folder`` holds something else.
    """
    target = folder_of(folder, "the output folder").absolute()
    if target.exists() and not (target.is_dir() and (is_universal(target) or not any(target.iterdir()))):
        raise CheckpointError(f"{target} exists and is not a universal checkpoint: give another folder")
    source.check()
    keys = _Keys(source)
    flats, save = flats_of(source, Target(2, 1)), new_save()
    with stage(target, state_bytes(source), over=True) as staged:
        (staged / STATES).mkdir()
        trained = [saved for flat in flats for saved in flat.parameters]
        _write_states(source, staged / STATES, trained, keys, save, workers, report)
        keys.check_used(strict)
        _write_rest(source, staged / STATES, {saved.name for saved in trained}, save)
        options = {
            **scaler_state(source),
            "param_groups": param_groups_of(source, flats),
            "ds_version": DEEPSPEED_VERSION,
        }
        save_pickled(
            staged / STATES / OPTIMIZER_STATE,
            {**options, **save, "optimizer_state_dict": _at_stage_3(source, trained, options)},
        )
        for level in (2, 3):
            state = {**model_state(source, flats, Target(level, 1), 0), **save}
            name = model_states_name(0, sharded=level == 3)
            save_pickled(staged / name, state if keys.info is None else {**state, INFO: keys.info})
        sync(staged / STATES)
        publish(staged, target, over=True)
    replace_text(target.parent / LATEST, target.name)
    return target


# -- states ---------------------------------------------------------------------------------------------------------


def _write_states(
    source: Source,
    folder: Path,
    trained: Sequence[SavedParameter],
    keys: _Keys,
    save: dict[str, str],
    workers: int,
    report: Report | None,
) -> None:
    places = [keys.of(saved) for saved in trained]  # before any is written: a fault of one is found at once

    def write(index: int) -> None:
        saved, (said, shape) = trained[index], places[index]
        inside = folder / _folder_name(saved.name)
        inside.mkdir()
        for state in ("master", *saved.moments, *_moments_among_scalars(saved)):
            value = _whole(source, saved, state)[: torch.Size(shape).numel()].view(shape)
            file = _FILE_OF.get(state, state)
            written: dict[str, Any] = {"as": f"{saved.name}/{file}", **save}
            if "step" in saved.scalars:
                written["step"] = float(number(saved.scalars["step"]))
            save_pickled(inside / f"{file}.pt", {**said, WRITTEN_AS: written, "param": value})
        if "step" in saved.scalars:
            save_pickled(inside / "step.pt", _step(source, saved.scalars["step"]))
        sync(inside)

    with ThreadPoolExecutor(max(1, workers)) as pool:
        for done, _ in enumerate(pool.map(write, range(len(trained))), 1):
            if report is not None:
                report(done, len(trained))


def _folder_name(name: str) -> str:
    if "/" in name or name in ("", ".", ".."):
        raise CheckpointError(f"the parameter {name!r} cannot have a folder of its name")
    return name


def _moments_among_scalars(saved: SavedParameter) -> list[str]:
    """Of a parameter of one number: so are its moments."""
    return [key for key in saved.scalars if key != "step"] if saved.numel == 1 else []


def _whole(source: Source, saved: SavedParameter, state: str) -> Tensor:
    if state in saved.states:
        return source.state(saved, state)
    return torch.tensor([float(number(saved.scalars[state]))])


def _write_rest(source: Source, folder: Path, trained: set[str], save: dict[str, str]) -> None:
    """Frozen parameters and buffers, as DeepSpeed writes them: values alone, in fp32."""
    for weight in source.weights():
        if weight.name in trained:
            continue
        inside = folder / _folder_name(weight.name)
        inside.mkdir()
        value = weight.read().reshape(weight.shape).float()
        save_pickled(inside / "fp32.pt", {WRITTEN_AS: {"as": f"{weight.name}/fp32", **save}, "param": value})


def _at_stage_3(source: Source, trained: Sequence[SavedParameter], options: dict[str, Any]) -> dict[str, Any]:
    """Its loader takes the step and the options of the first group from here."""
    steps = [saved.scalars["step"] for saved in trained if "step" in saved.scalars]
    return {
        "state": {0: {"step": _step(source, newest(steps))} if steps else {}},
        "param_groups": options["param_groups"],
    }


def _step(source: Source, value: Any) -> Any:
    """torch's optimizers count in a tensor, DeepSpeed's own in a number, and each fails with the other's."""
    step, optimizer = number(value), source.manifest.extra.get("optimizer") or {}
    if optimizer.get("counts_in_tensors", hasattr(torch.optim, str(optimizer.get("class")))):
        return torch.tensor(float(step))
    return int(step) if float(step).is_integer() else step


# -- what is said beside the tensors --------------------------------------------------------------------------------


class _Keys:
    """How parameters are cut: as the source tells, or its ``universal_checkpoint_info``, or the slices in it."""

    def __init__(self, source: Source) -> None:
        manifest = source.manifest
        client = source.common.get("client_state") or {}
        self.info = manifest.extra.get(INFO) or client.get(INFO)
        self._known = manifest.extra.get("universal") or {}
        self._rules = SliceRules(self.info, source.folder, 1)
        for weight in source.weights():  # those that are frozen too
            self._rules.place(weight.name, [tuple(weight.shape)])

    def of(self, saved: SavedParameter) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What is said of a parameter, and the shape that is written: a vocabulary loses what pads it."""
        place = self._rules.place(saved.name, [saved.shape])
        if saved.name in self._known:
            return self._known[saved.name], saved.shape
        cuts = list(dict.fromkeys(fragment.cut for fragment in saved.fragments if fragment.cut is not None))
        said = dict(place.keys)
        if cuts and said.get("cat_dim", 0) == 0 and "sub_param_shape" not in said and "param_n_sub_params" not in said:
            said.pop("cat_dim", None)
            said.update(_keys_of_cuts(saved, cuts))
        return said, place.shape

    def check_used(self, strict: bool) -> None:
        """What the patterns are for is in the model."""
        unused = self._rules.unused()
        if not unused:
            return
        text = f"patterns of {INFO} match no parameter: {', '.join(unused)[:1000]}"
        if strict:
            raise CheckpointError(f"{text}. They are misspelt, or of another model; strict=False (--no_strict) goes on")
        logger.warning("%s", text)


def _keys_of_cuts(saved: SavedParameter, cuts: Sequence[Any]) -> dict[str, Any]:
    """Slices of several ranges are of matrices packed along their dimension, if ranks have as many of each."""
    dim, counts = cuts[0].dim, {len(cut.ranges) for cut in cuts}
    if counts == {1}:
        return {"cat_dim": dim}
    if len(counts) > 1:
        return {"cat_dim": dim}
    ordered = sorted(cuts, key=lambda cut: cut.ranges)
    sizes = tuple(sum(cut.ranges[part][1] for cut in ordered) for part in range(counts.pop()))
    name = f"^{saved.name}$"
    return {"sub_param_shape": SubparamShape([name], (*saved.shape[:dim], sizes, *saved.shape[dim + 1 :]), dim)}
