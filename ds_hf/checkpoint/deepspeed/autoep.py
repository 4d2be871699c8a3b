"""A checkpoint as DeepSpeed's AutoEP names and divides it: what ``experts.py`` reads, for writing.

AutoEP takes a block of transformers apart: of the experts' two stacked weights it makes three, ``w1`` (gates), ``w2``
(down) and ``w3`` (ups), and it calls the router ``router.gate`` and the shared experts ``shared_experts``. A universal
folder with these names is loaded by DeepSpeed where ``expert_parallel`` is enabled; the model's own names are for where
it is not.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ds_hf.checkpoint.deepspeed.experts import AUTOEP
from ds_hf.checkpoint.format import SavedBuffer, SavedCut, SavedParameter
from ds_hf.checkpoint.source import Source
from ds_hf.checkpoint.tensors import StoredTensor, TensorFiles
from ds_hf.errors import CheckpointError

__all__ = ["as_autoep"]

_STACKED = re.compile(r"(.*)\.experts\.gate_up_proj")
_BESIDE = {  # children of a block, and what AutoEP calls them
    "gate": "router.gate",
    "shared_expert": "shared_experts",
    "shared_experts": "shared_experts",
    "shared_expert_gate": "shared_experts_gate",
}


@dataclass(frozen=True)
class _Half(SavedParameter):
    """Some rows of each expert's matrix.

    Attributes:
        whole: what has all of them; rows: which.
    """

    whole: SavedParameter
    rows: SavedCut


class _Files(TensorFiles):
    """Another's files, in which halves are read."""

    def __init__(self, files: TensorFiles) -> None:
        super().__init__(files.folder)
        self._files = files

    def piece(self, file: str, key: str) -> StoredTensor:
        return self._files.piece(file, key)

    def buffer(self, saved: SavedBuffer) -> Tensor:
        return self._files.buffer(saved)

    def fill(
        self, target: Tensor, parameter: SavedParameter, state: str, start: int = 0, cut: SavedCut | None = None
    ) -> None:
        if isinstance(parameter, _Half):
            self._files.fill(target, parameter.whole, state, start, parameter.rows)
        else:
            self._files.fill(target, parameter, state, start, cut)


def as_autoep(source: Source) -> Source:
    """``source`` with AutoEP's names and weights. Nothing is read.

    Raises:
        CheckpointError: no block has experts that AutoEP knows.
    """
    manifest = source.manifest
    blocks = {found[1]: saved for name, saved in manifest.parameters.items() if (found := _STACKED.fullmatch(name))}
    if not blocks:
        raise CheckpointError(
            f"{source.folder} has no experts that AutoEP knows (BLOCK.experts.gate_up_proj and down_proj): write the "
            "universal folder in the model's own names, without autoep"
        )
    for block, saved in blocks.items():
        _check(block, saved, manifest.parameters)
    given = {name: _parts(name, saved, blocks) for name, saved in manifest.parameters.items()}
    extra = dict(manifest.extra)
    groups = [[part.name for name in group for part in given[name]] for group in extra.get("groups") or ()]
    kinds: Mapping[str, Any] = extra.get("parameters") or {}
    extra["parameters"] = {part.name: kinds[name] for name in given if name in kinds for part in given[name]}
    counts = {f"{block}.experts.{key}": saved.shape[0] for block, saved in blocks.items() for key in ("w1", "w2", "w3")}
    extra["universal"] = {
        name: {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": count} for name, count in counts.items()
    }
    layers = [
        {
            "moe_layer_id": index,
            "module_path": block,
            "expert_key_prefix": f"{block}.experts",
            "num_experts": saved.shape[0],
            "num_local_experts": saved.shape[0],
            "ep_size": 1,
        }
        for index, (block, saved) in enumerate(blocks.items())
    ]
    common = {**source.common, "client_state": {**(source.common.get("client_state") or {}), AUTOEP: layers}}
    if isinstance(options := common.get("param_groups"), list):
        extra["groups"], common["param_groups"] = _groups(groups, options, counts)
    parameters = {part.name: part for parts in given.values() for part in parts}
    tied = {alias: _called(name, blocks) for alias, name in manifest.tied.items()}
    viewed = replace(manifest, parameters=parameters, tied=tied, extra=extra)
    return replace(source, manifest=viewed, files=_Files(source.files), common=common)


def _groups(
    groups: Sequence[list[str]], options: Sequence[dict[str, Any]], experts: Container[str]
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """DeepSpeed takes experts out of each group of parameters into groups after all others, of the same options and of
    at most so many elements. How many there are depends on the processes: it reads as many as it has, so there is one
    for each weight."""
    own = [[name for name in group if name not in experts] for group in groups]
    found, told = list(own), [dict(each) for each in options]
    for group, each in zip(groups, options, strict=True):
        theirs = [name for name in group if name in experts]
        found += [theirs if not index else [] for index in range(len(theirs))]
        told += [{**each, "moe": True} for _ in theirs]
    return found, told


def _parts(name: str, saved: SavedParameter, blocks: Mapping[str, SavedParameter]) -> list[SavedParameter]:
    """What a parameter of the model is to AutoEP."""
    block, _, weight = name.rpartition(".experts.")
    if block not in blocks or weight not in ("gate_up_proj", "down_proj"):
        return [replace(saved, name=_called(name, blocks))]
    if weight == "down_proj":
        return [replace(saved, name=f"{block}.experts.w2")]
    count, rows, columns = saved.shape[0], saved.shape[1] // 2, saved.shape[2]
    return [
        _Half(
            f"{block}.experts.{key}", (count, rows, columns), saved.trainable, saved.states, saved.fragments,
            saved.scalars, saved, SavedCut(1, ((first, rows),)),
        )
        for key, first in (("w1", 0), ("w3", rows))
    ]  # fmt: skip


def _called(name: str, blocks: Mapping[str, SavedParameter]) -> str:
    for child, known in _BESIDE.items():
        block, found, rest = name.partition(f".{child}.")
        if found and block in blocks:
            return f"{block}.{known}.{rest}"
    return name


def _check(block: str, saved: SavedParameter, parameters: Mapping[str, SavedParameter]) -> None:
    down = parameters.get(f"{block}.experts.down_proj")
    odd = [name for name in parameters if name.startswith(f"{block}.experts.") and name.endswith("_bias")]
    fits = down is not None and len(saved.shape) == len(down.shape) == 3 and not odd
    if fits and down is not None and saved.shape == (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return
    raise CheckpointError(
        f"the experts of {block} are none that DeepSpeed 0.19.8's AutoEP has a preset for: it takes gate_up_proj "
        "[experts, 2 * inner, width] and down_proj [experts, width, inner] without biases. Write the universal folder "
        "in the model's own names, without autoep"
    )
