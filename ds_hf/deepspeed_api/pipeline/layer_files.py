"""Weights of a ``PipelineModule``, a file for each layer: ``layer_03-model_states.pt``, where there are several
tensor-parallel processes with theirs in the name. For scripts that keep them so; not the engine's checkpoints.

Several processes replace these files one by one, and their names are the same in every save. So beside each lies a
hidden ``.layer_03-model_states.json``, gone while the file is written, that says of which save it is, and its checksum.
Files of two saves (one was killed), or in the place of others, are not loaded; DeepSpeed's have none of these and are.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from ds_hf.checkpoint.checksum import checksum_of_file
from ds_hf.checkpoint.files import replace_text
from ds_hf.deepspeed_api.checkpoint_engine import CheckpointEngine
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.errors import CheckpointError
from ds_hf.printable import harmless
from ds_hf.regular_files import read_object

__all__ = ["load", "path_of", "paths_of", "prefix", "save"]

_WAIT_S = 5.0  # for other processes that are writing their last files


def prefix(module: StageModule, folder: str, tag: str) -> str:
    """``folder/tag/module-pipe_00``, and so on for tensor-parallel processes."""
    where = module.topology().get_rank_repr(rank=module.global_rank, omit_axes=["data"])
    return os.path.join(folder, str(tag), "module" + (f"-{where}" if where else ""))


def path_of(module: StageModule, folder: str, local_index: int) -> str:
    """The file of a layer of this stage, counted from the first of the stage's layers."""
    return os.path.join(folder, _name_of(module, module.layer_ids[local_index], module.global_rank))


def _name_of(module: StageModule, layer: int, rank: int) -> str:
    where = module.topology().get_rank_repr(rank=rank, omit_axes=["data", "pipe"])
    return f"layer_{layer:02d}" + (f"-{where}" if where else "") + "-model_states.pt"


def paths_of(module: StageModule, folder: str, local_index: int) -> list[str]:
    """Those that are there of a layer, in order."""
    return [str(path) for path in _files_of(folder, module.layer_ids[local_index])]


def _files_of(folder: str, layer: int) -> list[Path]:
    return sorted(Path(folder).glob(f"layer_{layer:02d}-*model_states.pt"))


def save(module: StageModule, folder: str, engine: CheckpointEngine, *, exclude_frozen_params: bool) -> None:
    """The first data-parallel process of each stage writes its layers."""
    if not engine.is_data_parallel_writer(module.mpu().get_data_parallel_rank()):
        return
    engine.makedirs(folder, exist_ok=True)
    stamp = _new_stamp(module)
    for index, layer in _modules(module):
        state = layer.state_dict()
        if exclude_frozen_params:
            for name, param in layer.named_parameters():
                if not param.requires_grad:
                    state.pop(name, None)
        # A part of a larger storage (a flat buffer) would be written whole.
        path = Path(path_of(module, folder, index))
        _remove_stale(module, folder, index)
        _stamp_of(path).unlink(missing_ok=True)
        engine.save({name: _own(value) for name, value in state.items()}, str(path))
        known = {"checksum": checksum_of_file(path)} if path.is_file() else {}  # another's engine may write later
        replace_text(_stamp_of(path), json.dumps({"save": stamp, **known}))


def _new_stamp(module: StageModule) -> str:
    """What this save is called: the first process that comes here says it, and no process waits for another."""
    store, mine = _get_default_store(), uuid.uuid4().hex
    number = store.add(f"ds_hf/layer_files/of/{dist.get_rank()}", 1)
    return bytes(store.compare_set(f"ds_hf/layer_files/{number}", "", mine)).decode()


def _stamp_of(path: Path) -> Path:
    return path.with_name(f".{path.stem}.json")


def _remove_stale(module: StageModule, folder: str, local_index: int) -> None:
    """Files of this layer that another number of tensor-parallel processes wrote, and those of deeper models."""
    layer, topology = module.layer_ids[local_index], module.topology()
    names = {_name_of(module, layer, rank) for rank in range(topology.world_size())}
    stale = [path for path in _files_of(folder, layer) if path.name not in names]
    for path in Path(folder).glob("layer_*-*model_states.pt"):
        number = re.match(r"layer_(\d+)-", path.name)
        if number is not None and int(number[1]) >= module.layer_count:
            stale.append(path)
    for path in stale:
        path.unlink(missing_ok=True)
        _stamp_of(path).unlink(missing_ok=True)


def _check_one_save(module: StageModule, folder: str) -> None:
    """All files of the model's layers are of one save; one that other processes are just ending is waited for."""
    until = time.monotonic() + _WAIT_S
    while len(known := _saves(module, folder)) > 1:
        if time.monotonic() > until:
            first, second, *_ = known.values()
            raise CheckpointError(
                f"{first} and {second.name} are of two saves, of which one did not end: save the layers again, or, if "
                "they do belong together, remove the hidden files .layer_*.json beside them"
            )
        time.sleep(0.1)


def _saves(module: StageModule, folder: str) -> dict[str, Path]:
    """What the saves are called of which there are files, each with one of them."""
    known: dict[str, Path] = {}
    for layer in range(module.layer_count):
        for path in _files_of(folder, layer):
            known.setdefault(str(_said_of(path).get("save", "")), path)
    return known


def _said_of(path: Path) -> dict[str, Any]:
    """What lies beside a layer's file; nothing beside DeepSpeed's."""
    stamp = _stamp_of(path)
    try:
        return read_object(stamp, 4096)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{stamp} cannot be read: save the layers again") from harmless(error)


def _check_sum(path: Path) -> None:
    known = _said_of(path).get("checksum")
    try:
        same = known is None or checksum_of_file(path) == known
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not same:
        raise CheckpointError(
            f"{path} is damaged, or of another layer or save: copy it again, with the hidden files .layer_*.json. If "
            f"you have changed it yourself, remove {_stamp_of(path).name}"
        )


def load(module: StageModule, folder: str, engine: CheckpointEngine, *, strict: bool) -> None:
    """Each process reads its layers.

    Raises:
        CheckpointError: there is no file of a layer, or one that another number of tensor-parallel processes wrote, or
            files of two saves.
    """
    _check_one_save(module, folder)
    for index, layer in _modules(module):
        path, there = path_of(module, folder, index), paths_of(module, folder, index)
        if path not in there:
            found = f"there are {', '.join(Path(each).name for each in there)}" if there else "nothing of this layer is"
            raise CheckpointError(
                f"no {path}; {found} in that folder. Files of layers are read by as many tensor-parallel processes as "
                "have written them; checkpoints of engine.save_checkpoint() by any number"
            )
        _check_sum(Path(path))
        layer.load_state_dict(engine.load(path, map_location="cpu"), strict=strict)


def _modules(module: StageModule) -> list[tuple[int, nn.Module]]:
    """Those of this stage's layers that have a state, with their number in the stage."""
    layers = module.layer_modules()
    return [(place, layers[index]) for place, index in enumerate(module.layer_ids) if index in layers]


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
