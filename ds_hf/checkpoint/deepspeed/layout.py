"""Where DeepSpeed has parameters in the flat tensors of its ranks, for reading and for writing.

Stages 1 and 2 flatten a whole group, cut at one place a rank, so a parameter may lie in two ranks' files; stage 3 cuts
each parameter into equal parts, one a rank, the last one padded. Until files are known, a fragment's ``file`` is the
number of the rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ds_hf.checkpoint.deepspeed.pickles import FragmentAddress
from ds_hf.checkpoint.zero_to_fp32 import SavedFragment

__all__ = [
    "addressed",
    "count_of",
    "even_parts",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "in_order",
]


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
