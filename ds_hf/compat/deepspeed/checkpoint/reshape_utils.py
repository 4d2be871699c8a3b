"""Files of a checkpoint by their names, and which of them belong to a rank of a smaller mesh.

Ranks are numbered as in DeepSpeed: stages of the pipeline outermost, then tensor-parallel ranks; files of optimizer
states follow one another by data-parallel rank, then by these two. A mesh becomes smaller by giving each new rank the
files of as many neighbours; it cannot become larger.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ds_hf.checkpoint.deepspeed.pickles import load_pickled
from ds_hf.deepspeed_api.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX,
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    FP16_ZERO_FILE_PREFIX,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    ZERO_FILE_PREFIX,
)

__all__ = [
    "basic_folder_validation",
    "flatten_dp_dimension",
    "get_files",
    "get_files_with_prefix",
    "get_model_3d_descriptor",
    "get_model_3d_descriptor_from_metadata",
    "get_zero_files",
    "meg_2d_parallel_map",
    "merge_state",
    "merge_state_dict",
    "merge_state_list",
    "model_3d_desc",
    "partition_data",
    "reshape_meg_2d_parallel",
    "sort_zero_files",
    "unflatten_dp_dimension",
    "validate_files",
]

T = TypeVar("T")


# -- files ----------------------------------------------------------------------------------------------------------


def basic_folder_validation(dir: str) -> None:
    """Raise ``AssertionError`` unless ``dir`` is a folder, as DeepSpeed does."""
    if not os.path.exists(dir):
        raise AssertionError(f"{dir} path does not exist")
    if not os.path.isdir(dir):
        raise AssertionError(f"{dir} is not a folder")


def get_files(dir: str) -> list[str]:
    """Paths of all files in ``dir`` and below."""
    return [os.path.join(root, file) for root, _, files in os.walk(dir) for file in files]


def get_files_with_prefix(all_files: Iterable[str], prefix: str) -> list[str]:
    """Those whose names begin with ``prefix``, sorted."""
    return sorted(path for path in all_files if os.path.basename(path).startswith(prefix))


def validate_files(file_list: Iterable[str]) -> None:
    """Print those that are not there."""
    for file in file_list:
        if not os.path.isfile(file):
            print(f"Error: {file} is not existent")


def sort_zero_files(files: Iterable[str], prefix: str) -> list[str]:
    """By data-parallel, then by model-parallel rank.

    Raises:
        ValueError: a name has no ranks.
    """
    ranked = []
    for path in files:
        match = re.search(f"{prefix}([0-9]+)_{MODEL_FILE_PREFIX}([0-9]+)", path)
        if match is None:
            raise ValueError(f"Cannot parse dp_rank and mp_rank from {path}")
        ranked.append((int(match[1]), int(match[2]), path))
    return [path for *_, path in sorted(ranked)]


def get_zero_files(dir: str) -> list[str]:
    """Files of optimizer states, sorted by rank."""
    files = get_files(dir)
    for prefix in (ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX):
        found = get_files_with_prefix(files, prefix)
        if found:
            return sort_zero_files(found, prefix)
    return []


def partition_data(data_list: Sequence[T], num_partitions: int) -> list[list[T]]:
    """``num_partitions`` equal parts, one after another."""
    if len(data_list) % num_partitions:
        raise AssertionError(f"{len(data_list)} items do not make {num_partitions} equal parts")
    size = len(data_list) // num_partitions
    return [list(data_list[start : start + size]) for start in range(0, len(data_list), size)]


# -- merging states -------------------------------------------------------------------------------------------------


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Of two states of the same structure: tensors follow one another, of anything else the first is taken.

    Raises:
        ValueError: their types or the lengths of their lists differ.
    """
    if type(state_a) is not type(state_b):
        where = f" at {'.'.join(key_list)}" if key_list else ""
        raise ValueError(f"Cannot merge two states of types {type(state_a)} and type {type(state_b)}{where}")
    if type(state_a) in (dict, OrderedDict):
        return merge_state_dict(state_a, state_b, key_list)
    if type(state_a) in (list, tuple):
        return type(state_a)(merge_state_list(state_a, state_b, key_list))
    joins = torch.is_tensor(state_a) and state_a.dim() > 0  # torch's optimizers count in tensors without dimensions
    return torch.cat([state_a, state_b], 0) if joins else state_a


def merge_state_dict(dict_a: Any, dict_b: Any, key_list: Sequence[str]) -> Any:
    """Of the keys of the second."""
    merged = type(dict_a)({})
    for key, value in dict_b.items():
        merged[key] = merge_state(dict_a[key], value, [str(key)]) if key in dict_a else value
    return merged


def merge_state_list(list_a: Sequence[Any], list_b: Sequence[Any], key_list: Sequence[str]) -> list[Any]:
    """Item by item."""
    if len(list_a) != len(list_b):
        raise ValueError(f"Cannot merge lists of different lengths, a = {len(list_a)} b = {len(list_b)}")
    return [merge_state(a, b, key_list) for a, b in zip(list_a, list_b, strict=True)]


# -- two dimensions -------------------------------------------------------------------------------------------------


class meg_2d_parallel_map:
    """Lists of data by stage of the pipeline and tensor-parallel rank."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Number the ranks."""
        for index in range(self.pp_degree * self.tp_degree):
            self.map[self._make_key(index // self.tp_degree, index % self.tp_degree)] = [index]

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """More for one rank."""
        self._validate_indices(pp_index, tp_index)
        if type(data) is not list:
            raise AssertionError(f"data is a {type(data).__name__}, not a list")
        self.map.setdefault(self._make_key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Of one rank; without an index of all along that dimension."""
        self._validate_indices(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for pp in stages for tp in ranks for item in self.map[self._make_key(pp, tp)]]

    def print_data(self, tag: str) -> None:
        """Show the table."""
        print(tag)
        for key, value in self.map.items():
            print(f"{key} = {value}")

    def _validate_indices(self, pp_index: int | None, tp_index: int | None) -> None:
        if (pp_index is not None and pp_index >= self.pp_degree) or (
            tp_index is not None and tp_index >= self.tp_degree
        ):
            raise AssertionError(f"({pp_index}, {tp_index}) is outside of ({self.pp_degree}, {self.tp_degree})")

    def _make_key(self, i: int, j: int) -> str:
        return f"{i},{j}"


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """Which old ranks belong to which rank of a smaller mesh."""
    if new_pp_degree > old_pp_degree or new_tp_degree > old_tp_degree:
        raise AssertionError("a mesh can only become smaller")
    found = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    found.simple_init()
    tables = {"original_2d_map:": found}
    if new_tp_degree != old_tp_degree:
        old, found = found, meg_2d_parallel_map(old_pp_degree, new_tp_degree)
        for pp in range(old_pp_degree):
            for tp, ranks in enumerate(partition_data(old.get_data(pp_index=pp), new_tp_degree)):
                found.add_data(pp, tp, ranks)
        tables["after_tp_reshape:"] = found
    if new_pp_degree != old_pp_degree:
        old, found = found, meg_2d_parallel_map(new_pp_degree, new_tp_degree)
        for tp in range(new_tp_degree):
            for pp, ranks in enumerate(partition_data(old.get_data(tp_index=tp), new_pp_degree)):
                found.add_data(pp, tp, ranks)
    if verbose:
        for tag, table in {**tables, "final_2d_map:": found}.items():
            table.print_data(tag)
    return found


# -- three dimensions -----------------------------------------------------------------------------------------------


class model_3d_desc:
    """Sizes of a mesh of pipeline, tensor and data parallelism."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """For each data-parallel rank of the target the numbers of the files of each of its model-parallel ranks."""
        valid, errors = self.can_reshape(target_3d_desc)
        if not valid:
            raise AssertionError(",".join(errors))
        table = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree, verbose
        )
        flat = flatten_dp_dimension(table, self.pp_degree * self.tp_degree, self.dp_degree)
        return unflatten_dp_dimension(flat, target_3d_desc.dp_degree)

    def get_desc(self) -> str:
        """The sizes as text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is such a rank, and what is wrong otherwise."""
        sizes = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        faults = [
            f"{name} indexing error: index {index} >= degree {size}" for name, index, size in sizes if index >= size
        ]
        return not faults, faults

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether no dimension becomes larger, and which does."""
        other = target_3d_desc
        sizes = (
            ("PP", self.pp_degree, other.pp_degree),
            ("TP", self.tp_degree, other.tp_degree),
            ("DP", self.dp_degree, other.dp_degree),
        )
        faults = [
            f"Expansion reshape not supported - {name}: {old} ---> {new}" for name, old, new in sizes if new > old
        ]
        return not faults, faults


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Of each rank the files of all data-parallel ranks."""
    found = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for pp in range(found.pp_degree):
        for tp in range(found.tp_degree):
            for index in meg_2d_map.get_data(pp, tp):
                found.add_data(pp, tp, [index + rank * src_2d_size for rank in range(dp_degree)])
    return found


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """A table for each data-parallel rank, with its share of each rank's files."""
    found = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for pp in range(meg_2d_map.pp_degree):
        for tp in range(meg_2d_map.tp_degree):
            for table, indices in zip(found, partition_data(meg_2d_map.get_data(pp, tp), dp_degree), strict=True):
                table.add_data(pp, tp, indices)
    return found


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """The mesh that wrote a checkpoint."""
    files = get_files(dir)
    models = get_files_with_prefix(files, MODEL_FILE_PREFIX)
    known = [
        (path, {CHECKPOINT_PARALLEL_DIMS: load_pickled(Path(path)).get(CHECKPOINT_PARALLEL_DIMS)}) for path in models
    ]
    return get_model_3d_descriptor_from_metadata(files, get_zero_files(dir), known)


def get_model_3d_descriptor_from_metadata(
    file_list: Sequence[str], zero_file_list: Sequence[str], model_state_metadata: Sequence[tuple[str, dict[str, Any]]]
) -> model_3d_desc:
    """The same of what each model's file says of it; where none says anything, of the files' names.

    Raises:
        RuntimeError: files contradict each other, or their number does not fit.
    """
    said = [(path, known.get(CHECKPOINT_PARALLEL_DIMS)) for path, known in model_state_metadata]
    if all(sizes is None for _, sizes in said):
        first = len(get_files_with_prefix(file_list, f"{LAYER_FILE_PREFIX}01"))
        tp = first or len(said)
        pp = len(said) // tp if first else 1
        return model_3d_desc(pp, tp, max(1, len(zero_file_list) // (pp * tp)))
    lacking = [path for path, sizes in said if sizes is None]
    if lacking:
        raise RuntimeError(f"Checkpoint {CHECKPOINT_PARALLEL_DIMS} is missing from model-state files: {lacking}")
    found = {
        tuple(_size(path, sizes, key) for key in (CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE)) for path, sizes in said
    }
    if len(found) > 1:
        raise RuntimeError(f"Checkpoint {CHECKPOINT_PARALLEL_DIMS} disagrees across model-state files: {sorted(found)}")
    pp, tp = next(iter(found))
    if len(said) != pp * tp or len(zero_file_list) % (pp * tp):
        raise RuntimeError(
            f"{len(said)} model-state files and {len(zero_file_list)} ZeRO files do not fit pp_degree={pp} and "
            f"tp_degree={tp}"
        )
    return model_3d_desc(pp, tp, max(1, len(zero_file_list) // (pp * tp)))


def _size(path: str, sizes: Any, key: str) -> int:
    value = sizes.get(key) if isinstance(sizes, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RuntimeError(f"Checkpoint {key} must be a positive integer in {path}, got {value!r}.")
    return value
