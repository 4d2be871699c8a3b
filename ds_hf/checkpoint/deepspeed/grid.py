"""Which files of a folder that DeepSpeed wrote belong to which rank, and whether all are there.

Names carry two numbers: that of the data-parallel rank and that of the model-parallel one, which counts the stages of a
pipeline and in each the tensor-parallel ranks. ``mp_rank_01_model_states.pt`` has a model-parallel number alone;
``zero_pp_rank_3_mp_rank_01_optim_states.pt`` has both, "pp" being the data-parallel one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_hf.errors import CheckpointError

__all__ = ["Grid", "find_grid", "is_model_file"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,9})(?:-model_(\d{1,9}))?-model_states\.pt")


@dataclass(frozen=True)
class Grid:
    """Names of files.

    Attributes:
        models: by model-parallel rank, then by data-parallel rank: one where parameters are not sharded.
        optimizers: likewise; empty where nothing is sharded.
        layers: of a pipeline: number of the layer, tensor-parallel rank, name.
    """

    models: list[list[str]]
    optimizers: list[list[str]]
    layers: list[tuple[int, int, str]]

    @property
    def names(self) -> list[str]:
        """All of them."""
        rows = [*self.models, *self.optimizers, [name for *_, name in self.layers]]
        return [name for row in rows for name in row]


def is_model_file(name: str) -> bool:
    """Whether a file of that name holds the model of a rank."""
    return _MODEL.fullmatch(name) is not None


def find_grid(folder: Path, *, whole: bool = False) -> Grid:
    """The files of ``folder``.

    Args:
        whole: parameters are elsewhere, so of the models' files one kind and the first data-parallel rank are enough.

    Raises:
        CheckpointError: those of some ranks are missing, or there are experts in files of their own.
    """
    names = sorted(path.name for path in folder.iterdir())
    if any("expert" in name and name.endswith(".pt") for name in names):
        raise CheckpointError(f"{folder}: it holds experts in separate files, which cannot be imported")
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
    return Grid([row[:1] for row in models] if whole else models, optimizers, layers)


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
