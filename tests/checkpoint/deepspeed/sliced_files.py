"""DeepSpeed's files of tensor-parallel ranks, written as its format is described and not by the code under test.

Values are given whole; ``split`` says what each tensor-parallel rank holds of a parameter. At stages 1 and 2 a rank's
slices are flattened one after another and cut at one place a data-parallel rank; at stage 3 each slice is cut into
equal parts, the last one padded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.pickles import FragmentAddress, StaticScaler, ZeroStage, save_pickled
from ds_hf.checkpoint.source import Source

Values = Mapping[str, Mapping[str, Tensor]]  # by name, then "master", "exp_avg", "exp_avg_sq"
Split = Callable[[str, Tensor, int], Tensor]  # name, whole, tensor-parallel rank

OPTIONS = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


def values_of(source: Source) -> dict[str, dict[str, Tensor]]:
    """All states of an opened checkpoint, whole and in their shapes."""
    return {
        name: {state: source.state(saved, state).view(saved.shape) for state in saved.states}
        for name, saved in source.manifest.parameters.items()
    }


def write_slices(
    folder: Path,
    values: Values,
    split: Split,
    *,
    tensor: int = 2,
    data: int = 1,
    stage: int = 1,
    info: Any = None,
    step: int = 3,
    model: Mapping[str, Any] | None = None,
    frozen: Values | None = None,
    client: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] = OPTIONS,
) -> Path:
    """Write the folder of one tag.

    Args:
        model: of every file ``*_model_states.pt``, over what is there otherwise.
        frozen: parameters that do not train, with a state "weight".
    """
    folder.mkdir(parents=True)
    for rank in range(tensor):
        held = {name: {s: split(name, v, rank) for s, v in of.items()} for name, of in values.items()}
        still = {name: split(name, of["weight"], rank) for name, of in (frozen or {}).items()}
        state = _model(held, still, stage, data, tensor, step)
        state.update({**(model or {}), "module": {**state["module"], **(model or {}).get("module", {})}})
        state.update(client or {})
        if info is not None:
            state["universal_checkpoint_info"] = info
        for part in range(data if stage == 3 else 1):
            name = f"zero_pp_rank_{part}_mp_rank_{rank:02d}" if stage == 3 else f"mp_rank_{rank:02d}"
            fragments = {n: (_part(v, part, data) if stage == 3 else v.clone()) for n, v in still.items()}
            save_pickled(folder / f"{name}_model_states.pt", {**state, "frozen_param_fragments": fragments})
        for part in range(data):
            content = {
                "optimizer_state_dict": _optimizer(held, stage, part, data, step, options),
                "ds_version": "0.19.8",
            }
            save_pickled(folder / f"zero_pp_rank_{part}_mp_rank_{rank:02d}_optim_states.pt", content)
    (folder.parent / "latest").write_text(folder.name)
    return folder


def _model(held: Values, frozen: Mapping[str, Tensor], stage: int, data: int, tensor: int, step: int) -> dict[str, Any]:
    shapes = OrderedDict((name, of["master"].shape) for name, of in held.items())
    module = {name: of["master"].bfloat16().clone() for name, of in held.items()}
    module |= {name: value.clone() for name, value in frozen.items()}
    if stage == 3:
        module = {name: torch.empty(0, dtype=value.dtype) for name, value in module.items()}
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": {name: value.shape for name, value in frozen.items()} if stage > 1 else None,
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 2 * step,
        "dp_world_size": data,
        "mp_world_size": tensor,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tensor},
        "ds_config": {"optimizer": {"type": "AdamW"}},
        "ds_version": "0.19.8",
    }


def _optimizer(held: Values, stage: int, part: int, data: int, step: int, options: Mapping[str, Any]) -> dict[str, Any]:
    groups = [{**options, "params": [0]}]
    if stage == 3:
        flat = {state: torch.cat([_part(of[state], part, data) for of in held.values()]) for state in _states(held)}
        base = {"state": {0: {"step": torch.tensor(float(step)), **_moments(flat)}}, "param_groups": groups}
        return {
            "zero_stage": ZeroStage(3),
            "loss_scaler": StaticScaler(cur_scale=1.0),
            "optimizer_state_dict": base,
            "fp32_flat_groups": [flat["master"]],
        }
    total = sum(of["master"].numel() for of in held.values())
    numel = math.ceil(total / (2 * data)) * 2
    low, high = part * numel, (part + 1) * numel
    addresses, begin = OrderedDict(), 0
    for name, of in held.items():
        end = begin + of["master"].numel()
        first, last = max(begin, low), min(end, high)
        if first < last:
            addresses[name] = FragmentAddress(numel=last - first, start=first - low)
        begin = end
    flat = {}
    for state in _states(held):
        whole = torch.cat([*(of[state].reshape(-1) for of in held.values()), torch.zeros(numel * data - total)])
        flat[state] = whole[low:high].clone()
    padding = min(max(high - total, 0), numel)
    base = {"state": {0: {"step": torch.tensor(float(step)), **_moments(flat)}}, "param_groups": groups}
    return {
        "zero_stage": ZeroStage(stage),
        "loss_scaler": StaticScaler(cur_scale=1.0),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [flat["master"][: numel - padding].clone()],
        "group_paddings": [padding],
        "param_slice_mappings": [addresses],
    }


def _states(held: Values) -> list[str]:
    return list(next(iter(held.values())))


def _moments(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {state: value for state, value in flat.items() if state != "master"}


def _part(value: Tensor, part: int, data: int) -> Tensor:
    """Of a slice at stage 3; the padding is no number, which must not come out anywhere."""
    flat = value.reshape(-1)
    numel = math.ceil(flat.numel() / data)
    padded = torch.cat([flat, torch.full((numel * data - flat.numel(),), math.nan, dtype=flat.dtype)])
    return padded[part * numel : (part + 1) * numel].clone()
