"""Whole state dicts of a live engine, gathered unit by unit; those of a checkpoint are ``checkpoint.zero_to_fp32``'s.

Invariant: tied tensors stay tied - one tensor under several names - and peak memory on the device is one unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_hf.checkpoint.aside import publish_weights, weights_aside
from ds_hf.checkpoint.places import folder_of
from ds_hf.checkpoint.zero_to_fp32 import write_shard
from ds_hf.engine.checkpoint.agreement import together
from ds_hf.engine.checkpoint.holders import whole_value
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    adapter_names,
    aliases,
    extra_states,
    flat_buffers,
    module_buffers,
    names_now,
    parameter_name,
    world_of,
)
from ds_hf.engine.checkpoint.weights import find_whole, values_of
from ds_hf.engine.modules.quantized.layers import values_of_blocks
from ds_hf.engine.zero.buffer import buffers_of, unshard
from ds_hf.engine.zero.packed import tell_quantized_elsewhere
from ds_hf.engine.zero.param_names import is_resized
from ds_hf.log import logger

__all__ = ["clone_tensors_for_torch_save", "consolidated_state_dict", "save_16bit_model", "whole_state_dict"]


def consolidated_state_dict(
    engine: Checkpointable, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor] | None:
    """Whole weights in the model's dtype and persistent buffers on rank 0's CPU, ``None`` elsewhere. Collective.

    Args:
        exclude_frozen_parameters: leave out what does not train; adapters stay, also those that are switched off, and
            embeddings that the script has resized.
    """
    holders, stages = find_whole(engine, "gathering whole weights")
    first = holders.rank == 0
    adapters = adapter_names(engine.module)
    readable = values_of_blocks(engine.module)
    state: dict[str, Tensor] = {}
    now = names_now(engine)  # without those that left the model

    def wanted(name: str, param: Tensor) -> bool:
        kept = param.requires_grad or is_resized(param) or not adapters.isdisjoint(name.split("."))
        return not exclude_frozen_parameters or kept

    def put(name: str, param: Tensor) -> None:
        value = whole_value(engine, holders, parameter_name(engine, param, name), param)
        if first and value is not None:
            state[name] = readable(param, value).to("cpu", copy=True)

    placed: set[int] = set()
    for buffer in flat_buffers(engine) if stages.here else ():
        placed.update(map(id, buffer.owners))
        named = [(now[id(param)], param) for param in buffer.owners if id(param) in now]
        named = [(name, param) for name, param in named if wanted(name, param)]
        with torch.no_grad(), unshard([buffer] if buffer.sharded and named else []):
            for name, param in named:
                put(name, param)
    for param in engine.module.parameters() if stages.here else ():
        if id(param) not in placed and wanted(now[id(param)], param):
            put(now[id(param)], param)
    for name, value in values_of(engine, stages, lambda r: r.trains or not exclude_frozen_parameters):
        state[name] = value.to("cpu", copy=True)
    if not first:
        return None
    buffers, tied = module_buffers(engine.module)
    kept = {name: value for name, value in buffers.items() if name not in holders.own}
    state.update({name: value.detach().to("cpu", copy=True) for name, value in kept.items()})
    state.update({name: child.get_extra_state() for name, child in extra_states(engine.module).items()})
    for alias, name in {**stages.tied, **aliases(engine, now), **tied}.items():
        if name in state:
            state[alias] = state[name]
    names = engine.module.state_dict(keep_vars=True)  # of divided layers it would tell that values are parts
    order = {name.replace("_orig_mod.", ""): index for index, name in enumerate(names)}
    return dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))


def whole_state_dict(module: nn.Module) -> dict[str, Tensor] | None:
    """``module.state_dict()`` with whole weights, of a model that no engine drives; collective if it is sharded.

    Returns:
        ``None`` on other ranks than 0 where the model is sharded; the gathered weights are on the CPU.
    """
    buffers = buffers_of(module.parameters())
    first = not buffers or buffers[0].replicas.axis.rank == 0
    whole: dict[int, Tensor] = {}
    for buffer in buffers:
        with torch.no_grad(), unshard([buffer]):
            whole.update({id(param): param.detach().to("cpu", copy=True) for param in buffer.owners if first})
    if not first:
        return None
    named = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: whole.get(id(named[name]), value) if name in named else value
        for name, value in module.state_dict().items()
    }


def save_16bit_model(
    engine: Checkpointable,
    save_dir: str | Path,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write whole weights in the model's dtype to ``save_dir/save_filename`` (safetensors if it ends so). Collective.

    Returns:
        ``False``, with a warning, when the weights are sharded and may not be gathered.

    Raises:
        CheckpointPlaceError: ``save_dir`` or ``save_filename`` is empty or not a path.
    """
    gathers = engine.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save
    if engine.plan.shards_parameters and not gathers:
        logger.warning(
            "%s was not written: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true, or use "
            "save_checkpoint() and zero_to_fp32.py", save_filename,
        )  # fmt: skip
        return False
    world = world_of(engine)
    with together(world, "writing whole weights"):
        path = folder_of(save_dir, "save_dir") / folder_of(save_filename, "save_filename")
    if not exclude_frozen_parameters:
        tell_quantized_elsewhere(engine.module)
    state = consolidated_state_dict(engine, exclude_frozen_parameters)
    with together(world, f"writing {path}"):
        if state is not None:
            _write_whole(path, state)
    return True


def _write_whole(path: Path, state: dict[str, Tensor]) -> None:
    """Write a state dict so that the file is whole or not there."""
    with weights_aside(path.parent) as aside:
        staged = aside / path.name
        if path.suffix == ".safetensors":
            write_shard(staged, list(state), state)
        else:
            torch.save(state, staged)
        publish_weights(aside, path.parent, [path.name], sole=False)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """``item`` with every tensor in a storage of its own on ``device``, so that a view does not drag its base along.

    Tensors that are the same elements of one storage (tied weights) become one tensor again.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, made: dict[Any, Tensor]) -> Any:
    if isinstance(item, Tensor):
        return _clone_tensor(item, device, made)
    if isinstance(item, Mapping):
        content = {key: _clone(value, device, made) for key, value in item.items()}
        clone: Any = content if type(item) is dict else type(item)(content)  # type: ignore[call-arg]
        if hasattr(item, "_metadata"):  # versions of modules, in what nn.Module.state_dict() gives
            clone._metadata = item._metadata
        return clone
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_clone(value, device, made) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, made) for value in item)
    return item


def _clone_tensor(tensor: Tensor, device: torch.device, made: dict[Any, Tensor]) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return tensor.detach().clone().to(device)
    key: Any = id(tensor)  # of a tensor that wraps others (torchao): it has no storage of its own
    if not is_traceable_wrapper_subclass(tensor):
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    if key not in made:
        made[key] = tensor.detach().to(device, copy=True)
    return made[key]
