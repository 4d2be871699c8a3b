"""Which files of a folder that DeepSpeed wrote belong to which rank, and where in its flat tensors parameters lie.

Names carry two numbers: that of the data-parallel rank and that of the model-parallel one, which counts the stages of a
pipeline and in each the tensor-parallel ranks. ``mp_rank_01_model_states.pt`` has a model-parallel number alone;
``zero_pp_rank_3_mp_rank_01_optim_states.pt`` has both, "pp" being the data-parallel one.

Stages 1 and 2 flatten a whole group, cut at one place a rank, so a parameter may lie in two ranks' files; stage 3 cuts
each parameter into equal parts, one a rank, the last one padded. Until files are known, a fragment's ``file`` is the
number of the rank.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.deepspeed.pickles import FragmentAddress
from ds_hf.checkpoint.format import SavedFragment
from ds_hf.errors import CheckpointError

__all__ = [
    "Grid",
    "addressed",
    "count_of",
    "even_parts",
    "find_grid",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "in_order",
    "is_model_file",
]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,9})_expert_(\d{1,9})_mp_rank_(\d{1,9})_model_states\.pt")
_OF_EXPERTS = re.compile(r"expp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,9})(?:-model_(\d{1,9}))?-model_states\.pt")


@dataclass(frozen=True)
class Grid:
    """Names of files.

    Attributes:
        models: by model-parallel rank, then by data-parallel rank: one where parameters are not sharded.
        optimizers: likewise; empty where nothing is sharded.
        layers: of a pipeline: number of the layer, tensor-parallel rank, name.
        experts: by layer of experts, by expert.
        unsharded: without ZeRO, by process of those that divide experts: what it has of the optimizer.
    """

    models: list[list[str]]
    optimizers: list[list[str]]
    layers: list[tuple[int, int, str]]
    experts: list[list[str]] = field(default_factory=list)
    unsharded: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """All of them."""
        layers = [name for *_, name in self.layers]
        rows = [*self.models, *self.optimizers, layers, *self.experts, self.unsharded]
        return [name for row in rows for name in row]


def is_model_file(name: str) -> bool:
    """Whether a file of that name holds the model of a rank."""
    return _MODEL.fullmatch(name) is not None


def find_grid(folder: Path, *, whole: bool = False) -> Grid:
    """The files of ``folder``.

    Args:
        whole: parameters are elsewhere, so of the models' files one kind and the first data-parallel rank are enough.

    Raises:
        CheckpointError: those of some ranks or experts are missing, or experts lie in files of an older kind.
    """
    names = sorted(path.name for path in folder.iterdir())
    experts = _experts(folder, [name for name in names if "expert" in name and name.endswith(".pt")], whole=whole)
    if whole and any(name.startswith("mp_rank_") and is_model_file(name) for name in names):
        names = [name for name in names if not (name.startswith("zero_") and is_model_file(name))]
    models = _by_rank(folder, names, _MODEL)
    optimizers = [] if whole else _by_rank(folder, names, _OPTIMIZER)
    if not models:
        raise CheckpointError(f"{folder}: there is no file *_model_states.pt: this is not a checkpoint of DeepSpeed")
    if optimizers and len(optimizers) != len(models):
        raise CheckpointError(
            f"{folder}: there are models of {len(models)} model-parallel ranks, and optimizer states of "
            f"{len(optimizers)}: the files of some ranks are missing"
        )
    layers = [(int(match[1]), int(match[2] or 0), match[0]) for name in names if (match := _LAYER.fullmatch(name))]
    unsharded = [] if whole else _by_rank(folder, names, _OF_EXPERTS)
    if len(unsharded) > 1 or (experts and len(models) > 1):
        raise CheckpointError(
            f"{folder}: it has experts of several model-parallel ranks (mp_rank_01 and on), which cannot be imported"
        )
    return Grid([row[:1] for row in models] if whole else models, optimizers, layers, experts, *unsharded)


def _experts(folder: Path, names: Sequence[str], *, whole: bool) -> list[list[str]]:
    """The files of experts, by layer: one for each."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is None or int(match[3]) or whole:
            raise CheckpointError(
                f"{folder}: {name} holds experts of tensor-parallel ranks, of an older kind or of a universal folder, "
                "which cannot be imported"
            )
        found.setdefault(int(match[1]), {})[int(match[2])] = name
    for layer in sorted(found):
        _check_numbers(folder, sorted(found[layer]), f" of experts of layer {layer}")
    _check_numbers(folder, sorted(found), " of layers of experts")
    return [[found[layer][expert] for expert in sorted(found[layer])] for layer in sorted(found)]


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[list[str]]:
    found: dict[int, dict[int, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            row, rank = found.setdefault(int(match[2]), {}), int(match[1] or 0)
            if rank in row:
                raise CheckpointError(f"{folder}: {row[rank]} and {name} are of the same rank")
            row[rank] = name
    for number in sorted(found):
        _check_numbers(folder, sorted(found[number]), f" of model-parallel rank {number}" if len(found) > 1 else "")
    _check_numbers(folder, sorted(found), " (numbers after mp_rank_)")
    rows = [[found[number][rank] for rank in sorted(found[number])] for number in sorted(found)]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(f"{len(row)} of model-parallel rank {number}" for number, row in enumerate(rows))
        raise CheckpointError(f"{folder}: the files of some ranks are missing; present are {counts}")
    return rows


def _check_numbers(folder: Path, numbers: list[int], of: str) -> None:
    if numbers != list(range(len(numbers))):
        there = f"present are those of ranks {numbers}{of}"
        raise CheckpointError(f"{folder}: the files of some ranks are missing; {there}")


# -- places in flat tensors --------------------------------------------------------------------------------------------


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The file with the model of a tensor-parallel rank (``"00"``), where parameters are not sharded."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The file with the optimizer states of a data-parallel rank."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The file with a pipeline's layer (``"layer_03"``) of a tensor-parallel rank."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def even_parts(shapes: Mapping[str, tuple[int, ...]], world_size: int) -> dict[str, list[SavedFragment]]:
    """Stage 3: every rank holds an equal part of every parameter, one after another."""
    placed: dict[str, list[SavedFragment]] = {}
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world_size)
        placed[name] = [
            SavedFragment(str(rank), rank * part, offset, min(part, numel - rank * part))
            for rank in range(world_size)
            if rank * part < numel
        ]
        offset += part
    return placed


def addressed(ranks: list[Any]) -> dict[str, list[SavedFragment]]:
    """Stages 1 and 2: each rank tells where its partition has which parameter; a parameter's parts follow the ranks."""
    placed: dict[str, list[SavedFragment]] = {}
    for rank, addresses in enumerate(ranks):
        for name, address in addresses.items() if isinstance(addresses, Mapping) else ():
            if not isinstance(address, FragmentAddress):
                raise ValueError(f"param_slice_mappings of {name} holds a {type(address).__name__}")
            numel, offset = count_of(address.get("numel")), count_of(address.get("start"))
            rows = placed.setdefault(str(name), [])
            start = rows[-1].start + rows[-1].numel if rows else 0
            if numel:
                rows.append(SavedFragment(str(rank), start, offset, numel))
    return placed


def in_order(shapes: Mapping[str, tuple[int, ...]], lengths: list[int]) -> dict[str, list[SavedFragment]]:
    """Stages 1 and 2: parameters one after another across the ranks' partitions."""
    placed: dict[str, list[SavedFragment]] = {name: [] for name in shapes}
    for name, start, rank, offset, numel in _walk(shapes, lengths):
        placed[name].append(SavedFragment(str(rank), start, offset, numel))
    return placed


def _walk(shapes: Mapping[str, tuple[int, ...]], lengths: list[int]) -> Iterator[tuple[str, int, int, int, int]]:
    rank = offset = 0
    for name, shape in shapes.items():
        start, numel = 0, math.prod(shape)
        while start < numel and rank < len(lengths):
            taken = min(numel - start, lengths[rank] - offset)
            if taken:
                yield name, start, rank, offset, taken
            start, offset = start + taken, offset + taken
            if offset == lengths[rank]:
                rank, offset = rank + 1, 0


def count_of(value: Any) -> int:
    """A number that may be a size; ``ValueError`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"it has {str(value)[:80]!r} where a number is expected")
    return int(value)
