"""What the engine of rank 0 tells of a checkpoint: the part of the manifest that no rank's files hold.

It is taken at the moment that is saved; ``reports.complete`` adds what the ranks wrote, perhaps much later.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ds_hf.checkpoint.format import FORMAT, VERSION
from ds_hf.config.types.root import AXES
from ds_hf.engine.checkpoint.frozen import samples
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    adapter_scalings,
    flat_buffers,
    loose_parameters,
    names_of,
    parameter_name,
    world_of,
)
from ds_hf.engine.modules.quantized.layers import formats_of_blocks
from ds_hf.engine.optim.streaming import library_of
from ds_hf.log import own_version

__all__ = ["counters", "describe", "formats_by_name", "mesh_sizes"]

Json = dict[str, Any]


def describe(engine: Checkpointable, tag: str, common_file: str, exclude_frozen: bool) -> Json:
    """What the engine of rank 0 alone tells of a checkpoint that is taken of it now; of frozen weights that are left
    out, a few values."""
    world = world_of(engine)
    order = [name for buffer in flat_buffers(engine) for name in names_of(engine, buffer)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": {"ds_hf": own_version(), "torch": torch.__version__},
        "tag": tag,
        "world_size": world.world_size,
        **mesh_sizes(engine),
        "counters": counters(engine),
        "common_file": common_file,
        "optimizer": _optimizer(engine),
        "groups": _given_groups(engine),
        "parameters": [*order, *loose_parameters(engine)],
        **({"model_config": config} if (config := _config_of(engine.module)) else {}),
        **({"blocks": blocks} if (blocks := formats_by_name(engine)) else {}),
        **({"scalings": scalings} if (scalings := adapter_scalings(engine.module)) else {}),
        **({"frozen": frozen} if exclude_frozen and (frozen := samples(engine)) else {}),
    }


def _config_of(module: torch.nn.Module) -> Json | None:
    """``config.json`` of a model of transformers, as its ``save_pretrained`` has it; adapters have files of theirs."""
    config: Any = getattr(module, "config", None)
    if (
        not hasattr(config, "to_json_string")
        or not hasattr(module, "save_pretrained")
        or hasattr(module, "peft_config")
    ):
        return None
    try:
        content: Json = json.loads(config.to_json_string())
    except (TypeError, ValueError):  # something of the user's in it
        return None
    return {**content, "architectures": [type(module).__name__]}


def mesh_sizes(engine: Checkpointable) -> Json:
    """How the processes are divided, where not all of them are data-parallel."""
    sizes = {axis: getattr(engine.mesh.shape, axis) for axis in AXES}
    return {} if sizes["data"] == world_of(engine).world_size else {"mesh": sizes}


def counters(engine: Checkpointable) -> dict[str, int]:
    """How far training has come."""
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.accumulation.micro_steps,
    }


def _optimizer(engine: Checkpointable) -> dict[str, Any] | None:
    """Class and library of the optimizer; whether it saw parameters whole or in the pieces that the fragments are."""
    if engine.optimizer is None:
        return None
    inner = engine.optimizer.optimizer
    return {"class": type(inner).__name__, "library": library_of(inner), "whole": engine.optimizer.whole}


def formats_by_name(engine: Checkpointable) -> dict[str, list[Any]]:
    """How the weights are written that lie in blocks of few bits."""
    formats = formats_of_blocks(engine.module)
    return {parameter_name(engine, param): form for param, form in formats}


def _given_groups(engine: Checkpointable) -> list[list[str]] | None:
    """Names of each parameter group in the user's order, by which DeepSpeed knows parameters; ``None`` without one."""
    if engine.optimizer is None:
        return None
    return [[engine.param_names.get(id(param), "") for param in group] for group in engine.optimizer.given]
