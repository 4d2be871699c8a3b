"""Reading checkpoints that DeepSpeed wrote (ZeRO stages 0 to 3) as if they were ours.

DeepSpeed keeps one flat fp32 tensor a rank and parameter group, with moments of the same layout, and tells the order
of the parameters beside it. That is what a manifest says too: fragments of parameters in flat tensors. Nothing is
copied: files are mapped, and read when a parameter is wanted. Tensor-parallel ranks flatten slices, whose places in the
whole parameters ``deepspeed_slices`` knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.layout import addressed, count_of, even_parts, find_grid, in_order, is_model_file
from ds_hf.checkpoint.deepspeed.module import ModelStates
from ds_hf.checkpoint.deepspeed.pickles import (
    as_step,
    base_groups,
    load_pickled,
    names_of_groups,
    of,
    options_of,
    scaler_of,
)
from ds_hf.checkpoint.deepspeed.unsharded import read_unsharded
from ds_hf.checkpoint.deepspeed.whole import Found, Local
from ds_hf.checkpoint.format import SavedFragment
from ds_hf.checkpoint.scalars import encode_scalar
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.errors import CheckpointError
from ds_hf.log import logger
from ds_hf.printable import harmless

__all__ = ["as_written", "is_deepspeed", "read_deepspeed"]

_COMPARED = 256  # elements of a tensor that are looked at before all are
_FAULTS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError)


def is_deepspeed(folder: Path) -> bool:
    """Whether ``folder`` is a tag's folder that DeepSpeed wrote."""
    return folder.is_dir() and any(is_model_file(path.name) for path in folder.iterdir())


def read_deepspeed(folder: Path, *, assumed: bool = False) -> Source:
    """Open the folder of one tag.

    Args:
        assumed: where nothing says how tensor-parallel slices are put together, they follow one another.

    Raises:
        CheckpointError: it is incomplete, damaged, or of a kind that cannot be read.
    """
    with as_written(folder, "DeepSpeed"):
        return _Reader(folder, assumed).read()


@contextmanager
def as_written(folder: Path, writer: str) -> Iterator[None]:
    """What a folder lacks of its writer's layout is a ``CheckpointError``."""
    try:
        yield
    except CheckpointError:
        raise
    except _FAULTS as error:
        told = f"{folder} is not as {writer} writes it: {type(error).__name__}: {error}"
        raise CheckpointError(told) from harmless(error)


class _Flat:
    """What the data-parallel ranks hold of one flat tensor: ``[rank][state]``, and the scalars beside it."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.moments: list[dict[str, Tensor]] = []
        self.scalars: dict[str, Any] = {}


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path, assumed: bool) -> None:
        self.folder = folder
        self.grid = find_grid(folder)
        self.states = ModelStates(folder, self.grid, assumed=assumed)
        self.found = Found(folder)
        self.known_as: dict[str, list[str]] = {}  # of experts' parameters in the files: names in the model

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {reason}")

    def read(self) -> Source:
        states = self.states
        optimizers = [self._optimizer_states(names) for names in self.grid.optimizers]
        stage = count_of(optimizers[0][0].get("zero_stage", 1)) if optimizers else 0
        common = states.common()
        if optimizers:
            if stage == 3 and len(self.grid.models[0]) != states.world_size:
                raise self._fail(
                    f"{states.world_size} ranks wrote it, but there are model states of {len(self.grid.models[0])}"
                )
            self._trained(optimizers, stage)
            self._options(common, optimizers[0][0], stage)
        elif self.grid.unsharded:
            read_unsharded(states, self.found, common)
        elif states.first.get("optimizer") is not None:
            logger.warning(
                "%s was written without ZeRO: its moments have no names and are left out, weights are read", self.folder
            )
        tied = states.tied()
        buffers = states.rest(self.found, tied, common["extra_state"])
        states.place_experts(self.found)
        return states.source(CheckpointKind.DEEPSPEED, self.found, stage, buffers, tied, common, self.grid.names)

    def _optimizer_states(self, names: list[str]) -> list[dict[str, Any]]:
        if len(names) != self.states.world_size:
            raise self._fail(f"{self.states.world_size} ranks wrote it, but there are optimizer states of {len(names)}")
        found = []
        for name in names:
            content = load_pickled(self.folder / name)
            self.states.check_save(content, name)
            found.append(of(dict, content.get("optimizer_state_dict"), self.folder / name, "optimizer_state_dict"))
        return found

    # -- trained parameters ---------------------------------------------------------------------------------------

    def _trained(self, optimizers: list[list[dict[str, Any]]], stage: int) -> None:
        """Those of each stage of the pipeline; what several stages have (tied ones) is that of the first."""
        for pipe in range(self.states.pipe):
            columns = [self.states.column(pipe, tensor) for tensor in range(self.states.tensor)]
            held = [self._column(column, optimizers[column], stage) for column in columns]
            for name in held[0]:
                lacking = [self.states.file(c) for c, rank in zip(columns, held, strict=True) if name not in rank]
                if lacking:
                    raise self._fail(f"{lacking[0]} does not have {name}, which other ranks have")
                if name in self.found.parameters:
                    continue
                locals_ = [rank[name] for rank in held]
                place = self.states.place(name, [local.shape for local in locals_])
                self.found.add(name, locals_, place, trainable=True)
            self._name_groups(optimizers[columns[0]][0], columns[0], stage)

    def _column(self, column: int, optimizers: list[dict[str, Any]], stage: int) -> dict[str, Local]:
        """What one model-parallel rank has, spread over data-parallel ones."""
        shapes, files = self.states.shapes(column), self.grid.optimizers[column]
        groups = [self._flat(optimizers, files, index, stage) for index in range(len(shapes))]
        if stage == 3:
            self._check_that_ranks_differ(groups, files)
        found: dict[str, Local] = {}
        for index, (group, sized) in enumerate(zip(groups, shapes, strict=True)):
            experts = [name for name in sized if self.states.experts.is_expert(name)]
            if not experts:
                ranks = list(range(len(optimizers)))
                placed = self._placed(index, group, sized, optimizers, ranks, stage)
                found.update(self._locals(index, group, files, sized, placed))
                continue
            if len(experts) != len(sized):
                raise self._fail(f"parameters of experts and others lie in one flat tensor: {experts[0]}")
            partitions = optimizers[0].get("partition_count")
            counted = partitions[index] if isinstance(partitions, list) else 1
            held = []
            for ranks in self.states.experts.processes(len(optimizers), experts, counted):
                placed = self._placed(index, group, sized, optimizers, ranks, stage)
                held.append(self._locals(index, group, files, sized, placed))
            self.known_as.update(self.states.experts.place(self.found, held))
        return found

    def _placed(
        self,
        index: int,
        group: _Flat,
        sized: dict[str, tuple[int, ...]],
        optimizers: list[dict[str, Any]],
        ranks: list[int],
        stage: int,
    ) -> dict[str, list[SavedFragment]]:
        """Where the parameters of a flat tensor lie that ``ranks`` divide; each fragment's file is one of them."""
        addresses = [optimizers[rank].get("param_slice_mappings") for rank in ranks]
        if stage == 3:
            placed = even_parts(sized, len(ranks))
        elif all(isinstance(address, list) and index < len(address) for address in addresses):
            placed = addressed([self.states.experts.addresses(address[index]) for address in addresses])  # type: ignore[index]
        else:
            placed = in_order(sized, [group.values[rank].numel() for rank in ranks])
        return {name: [replace(row, file=str(ranks[int(row.file)])) for row in rows] for name, rows in placed.items()}

    def _flat(self, optimizers: list[dict[str, Any]], files: list[str], index: int, stage: int) -> _Flat:
        group = _Flat()
        flat, inner = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else (
            "single_partition_of_fp32_groups", "base_optimizer_state"
        )  # fmt: skip
        for state, file in zip(optimizers, files, strict=True):
            path = self.folder / file
            tensors = of(list, state.get(flat), path, flat)
            base = state.get(inner)
            if isinstance(base, list):
                raise CheckpointError(f"{path} was saved with zero_optimization.elastic_checkpoint: switch that off")
            known = of(dict, of(dict, base, path, inner).get("state"), path, f"{inner}.state")
            if index >= len(tensors) or not isinstance(tensors[index], Tensor) or tensors[index].dim() != 1:
                raise CheckpointError(f"{path}: {flat} has no flat tensor {index}")
            group.values.append(tensors[index].detach())
            of_group = of(dict, known.get(index, {}), path, f"{inner}.state")
            group.moments.append({k: v.detach() for k, v in of_group.items() if isinstance(v, Tensor) and v.dim() == 1})
            for key, value in of_group.items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
                    if key == "step" and float(value) != float(group.scalars.get("step", value)):
                        raise self._fail(
                            f"{file} was saved after {float(value):.0f} steps of the optimizer, {files[0]} after "
                            f"{float(group.scalars['step']):.0f}: the files are of different saves"
                        )
                    group.scalars[str(key)] = value
                    self.found.counts_in_tensors |= key == "step" and isinstance(value, Tensor)
        return group

    def _check_that_ranks_differ(self, groups: list[_Flat], files: list[str]) -> None:
        """At stage 3 nothing in a file says whose it is: that one was copied over another shows in its values alone.

        Equal constants, such as norms before the first step, are no sign of it.
        """
        known: dict[Any, int] = {}
        for rank, file in enumerate(files):
            held = [[group.values[rank], *group.moments[rank].values()] for group in groups]
            flat = [tensor for tensors in held for tensor in tensors]
            first = tuple((tensor.numel(), *tensor[:_COMPARED].tolist()) for tensor in flat)
            other = known.setdefault(first, rank)
            if other == rank or not any(value.numel() and bool((value != value[0]).any()) for value in flat):
                continue
            others = [[group.values[other], *group.moments[other].values()] for group in groups]
            if all(torch.equal(a, b) for a, b in zip(flat, (t for ts in others for t in ts), strict=True)):
                raise self._fail(f"{file} holds the same as {files[other]}: one was copied over the other")

    def _locals(
        self,
        index: int,
        group: _Flat,
        files: list[str],
        shapes: dict[str, tuple[int, ...]],
        placed: dict[str, list[SavedFragment]],
    ) -> dict[str, Local]:
        keys = list(dict.fromkeys(key for moments in group.moments for key in moments))
        states = {"master": f"group.{index}.master", **{key: f"group.{index}.{key}" for key in keys}}
        for rank, name in enumerate(files):
            self.found.tensors[name, states["master"]] = group.values[rank]
            for key in keys:
                if key in group.moments[rank]:
                    self.found.tensors[name, states[key]] = group.moments[rank][key]
        scalars = {key: encode_scalar(as_step(key, value)) for key, value in group.scalars.items()}
        found = {}
        for name, shape in shapes.items():
            rows = [
                SavedFragment(files[int(fragment.file)], fragment.start, fragment.offset, fragment.numel)
                for fragment in placed.get(name, ())
            ]
            found[name] = Local(shape, states, rows, scalars)
        return found

    # -- options --------------------------------------------------------------------------------------------------

    def _name_groups(self, state: dict[str, Any], column: int, stage: int) -> None:
        options = self._saved_groups(state, stage)
        if options is None:
            return
        for index, names in enumerate(names_of_groups(options, self.states.shapes(column))):
            if index == len(self.found.groups):
                self.found.groups.append([])
            whole = [each for name in names for each in self.known_as.get(name, [name])]
            known = dict.fromkeys([*self.found.groups[index], *whole])
            self.found.groups[index] = list(known)

    @staticmethod
    def _saved_groups(state: dict[str, Any], stage: int) -> list[dict[str, Any]] | None:
        return base_groups(state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state"))

    def _options(self, common: dict[str, Any], state: dict[str, Any], stage: int) -> None:
        groups = self._saved_groups(state, stage)
        if groups is not None:
            common["param_groups"] = options_of(groups)
        scaler = scaler_of(state.get("loss_scaler"))
        if scaler is not None:
            common["loss_scaler"] = scaler
