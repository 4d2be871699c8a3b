"""Weights of a ``PipelineModule``, a file for each layer: ``layer_03-model_states.pt``, where there are several
tensor-parallel processes with theirs in the name. For scripts that keep them so; not the engine's checkpoints.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointEngine
from ds_hf.engine.pipeline.module import StageModule
from ds_hf.errors import CheckpointError

__all__ = ["load", "path_of", "paths_of", "prefix", "save"]


def prefix(module: StageModule, folder: str, tag: str) -> str:
    """``folder/tag/module-pipe_00``, and so on for tensor-parallel processes."""
    where = module.topology().get_rank_repr(rank=module.global_rank, omit_axes=["data"])
    return os.path.join(folder, str(tag), "module" + (f"-{where}" if where else ""))


def path_of(module: StageModule, folder: str, local_index: int) -> str:
    """The file of a layer of this stage, counted from the first of the stage's layers."""
    where = module.topology().get_rank_repr(rank=module.global_rank, omit_axes=["data", "pipe"])
    name = f"layer_{module.layer_ids[local_index]:02d}" + (f"-{where}" if where else "")
    return os.path.join(folder, f"{name}-model_states.pt")


def paths_of(module: StageModule, folder: str, local_index: int) -> list[str]:
    """Those that are there of a layer, in order."""
    name = f"layer_{module.layer_ids[local_index]:02d}-*model_states.pt"
    return sorted(str(path) for path in Path(folder).glob(name))


def save(module: StageModule, folder: str, engine: CheckpointEngine, *, exclude_frozen_params: bool) -> None:
    """The first data-parallel process of each stage writes its layers."""
    if not engine.is_data_parallel_writer(module.mpu().get_data_parallel_rank()):
        return
    engine.makedirs(folder, exist_ok=True)
    for index, layer in _modules(module):
        state = layer.state_dict()
        if exclude_frozen_params:
            for name, param in layer.named_parameters():
                if not param.requires_grad:
                    state.pop(name, None)
        # A part of a larger storage (a flat buffer) would be written whole.
        engine.save({name: _own(value) for name, value in state.items()}, path_of(module, folder, index))


def load(module: StageModule, folder: str, engine: CheckpointEngine, *, strict: bool) -> None:
    """Each process reads its layers.

    Raises:
        CheckpointError: there is no file of a layer, or one that another number of tensor-parallel processes wrote.
    """
    for index, layer in _modules(module):
        path, there = path_of(module, folder, index), paths_of(module, folder, index)
        if path not in there:
            found = f"there are {', '.join(Path(each).name for each in there)}" if there else "nothing of this layer is"
            raise CheckpointError(
                f"no {path}; {found} in that folder. Files of layers are read by as many tensor-parallel processes as "
                "have written them; checkpoints of engine.save_checkpoint() by any number"
            )
        layer.load_state_dict(engine.load(path, map_location="cpu"), strict=strict)


def _modules(module: StageModule) -> list[tuple[int, nn.Module]]:
    """Those of this stage's layers that have a state, with their number in the stage."""
    layers = module.layer_modules()
    return [(place, layers[index]) for place, index in enumerate(module.layer_ids) if index in layers]


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
