"""Moments that DeepSpeed saved without ZeRO beside experts: torch's own states, which know parameters by number.

Each process of those that divide experts has a file of what it held, ``expp_rank_E_mp_rank_00_optim_states.pt``.
Numbers follow the groups, and a group the model, so names follow from the shapes; where shapes fit more than one order
the moments are left out, and weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.module import ModelStates
from ds_hf.checkpoint.deepspeed.pickles import as_step, base_groups, load_pickled, of, options_of
from ds_hf.checkpoint.deepspeed.whole import Found, Local
from ds_hf.checkpoint.format import SavedFragment
from ds_hf.checkpoint.scalars import encode_scalar
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["read_unsharded"]

_Values = dict[str, Tensor]  # weights of one process, in the order of its model


def read_unsharded(states: ModelStates, found: Found, common: dict[str, Any]) -> None:
    """Put what was trained into ``found``, with its moments, and options of the groups into ``common``.

    Raises:
        CheckpointError: files contradict each other.
    """
    optimizers = []
    for name in states.grid.unsharded:
        path = states.folder / name
        optimizers.append(of(dict, load_pickled(path).get("optimizer"), path, "optimizer"))
    first = base_groups(optimizers[0])
    if first is None or any(_options(each) != _options(optimizers[0]) for each in optimizers):
        return _left_out(states, "its optimizer is not torch's, or not the same in all files")
    values = [_values(states, process, len(optimizers)) for process in range(len(optimizers))]
    if any(value.dtype != torch.float32 for each in values for value in each.values()):
        return _left_out(states, "its weights are not in fp32, and masters have no names")
    dense = [name for name in values[0] if not states.experts.is_expert(name)]
    experts = [name for name in values[0] if states.experts.is_expert(name)]
    chosen: dict[int, str] = {}  # by number
    for names, moe in ((dense, False), (experts, True)):
        groups = [group for group in first if bool(group.get("moe")) == moe]
        numbers = _numbers(groups, {name: values[0][name] for name in names}, optimizers[0])
        if numbers is None:
            last = f"{states.grid.unsharded[-1]} is the last file of them, others may be missing"
            return _left_out(states, f"the shapes of its moments fit no order of its parameters, or several; {last}")
        chosen.update(numbers)
    held = [_held(states, found, *each, chosen) for each in zip(states.grid.unsharded, optimizers, values, strict=True)]
    for name in dense:
        if name in held[0]:
            found.add(name, [held[0][name]], None, trainable=True)
    known_as = states.experts.place(found, [{n: one[n] for n in experts if n in one} for one in held])
    found.counts_in_tensors = any(
        isinstance(entry.get("step"), Tensor) for entry in optimizers[0]["state"].values() if isinstance(entry, dict)
    )
    for group in first:
        names = [chosen[number] for number in group["params"]]
        found.groups.append([whole for name in names for whole in known_as.get(name, [name])])
    common["param_groups"] = options_of(first)
    return None


def _left_out(states: ModelStates, reason: str) -> None:
    logger.warning("%s: moments are left out, weights are read: %s", states.folder, reason)


def _options(optimizer: Mapping[str, Any]) -> list[tuple[Any, int]]:
    groups = base_groups(optimizer) or []
    return [(group.get("name"), len(group.get("params") or ())) for group in groups]


def _values(states: ModelStates, process: int, size: int) -> _Values:
    """Weights that a process held, by the names there: first those that are no experts'."""
    buffers, tied = {str(name) for name in states.first.get("buffer_names") or ()}, states.tied()
    module = states.module(0).items()
    values = {n: v.detach() for n, v in module if isinstance(v, Tensor) and n not in buffers and n not in tied}
    stacked: dict[str, list[Tensor]] = {}
    for files in states.grid.experts:
        if len(files) % size:
            raise CheckpointError(f"{states.folder}: {files[0]} is of {len(files)} experts, of {size} processes")
        each = len(files) // size
        for index in range(each):
            number = process * each + index
            for name, value in load_pickled(states.folder / files[number]).items():
                base, _, last = str(name).rpartition(".")
                if states.experts.is_expert(base) and last.isdecimal():
                    stacked.setdefault(base, []).append(value)
                else:
                    own = str(name).replace(f".deepspeed_experts.{number}.", f".deepspeed_experts.{index}.")
                    values[own] = value.detach()
    values.update({name: torch.stack(parts) for name, parts in stacked.items()})
    return values


def _numbers(
    groups: Sequence[Mapping[str, Any]], values: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> dict[int, str] | None:
    """Names of the numbers of ``groups``; ``None`` where their states do not tell.

    Parameters follow one another as in the model; or matrices are in one group and vectors in another, as scripts
    divide them by weight decay; AutoEP puts routers last.
    """
    numbers = [int(number) for group in groups for number in group["params"]]
    shapes = {number: _shape(optimizer, number) for number in numbers}
    last = [*(n for n in values if not n.endswith("gate.weight")), *(n for n in values if n.endswith("gate.weight"))]
    matrices, vectors = [n for n in values if values[n].dim() > 1], [n for n in values if values[n].dim() < 2]
    orders = [list(values), last, *([[*matrices, *vectors], [*vectors, *matrices]] if len(groups) > 1 else [])]
    fitting: list[dict[int, str]] = []
    for order in orders:
        if len(order) != len(numbers):
            continue
        found = dict(zip(numbers, order, strict=True))
        if all(shapes[n] in (None, values[name].shape) for n, name in found.items()) and found not in fitting:
            fitting.append(found)
    return fitting[0] if len(fitting) == 1 else None


def _shape(optimizer: Mapping[str, Any], number: int) -> torch.Size | None:
    entry = optimizer["state"].get(number) or {}
    return next((value.shape for value in entry.values() if isinstance(value, Tensor) and value.dim()), None)


def _held(
    states: ModelStates,
    found: Found,
    file: str,
    optimizer: Mapping[str, Any],
    values: _Values,
    chosen: Mapping[int, str],
) -> dict[str, Local]:
    """What one process has of each parameter, all seen as lying in its file."""
    held = {}
    for number, name in chosen.items():
        value, entry = values[name], optimizer["state"].get(number) or {}
        keys = {"master": f"module.{name}"}
        found.tensors[file, keys["master"]] = value
        scalars = {}
        for key, moment in entry.items():
            if isinstance(moment, Tensor) and moment.dim():
                if moment.shape != value.shape:
                    raise CheckpointError(f"{states.folder / file}: {key} of {name} has shape {list(moment.shape)}")
                keys[str(key)] = f"{key}.{name}"
                found.tensors[file, keys[str(key)]] = moment.detach()
            elif isinstance(moment, int | float | Tensor):
                scalars[str(key)] = encode_scalar(as_step(str(key), moment))
        rows = [SavedFragment(file, 0, 0, value.numel())] if value.numel() else []
        held[name] = Local(tuple(value.shape), keys, rows, scalars)
    return held
