"""Whole weights of a live engine as transformers loads them, one unit in memory at a time.

Every file is planned from shapes alone and then filled tensor by tensor, so nothing else is ever gathered. Further
names of tied weights are left out, as ``save_pretrained`` does: ``from_pretrained`` ties them again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.model_files import copy_model_files, set_dtype
from ds_hf.checkpoint.places import folder_of
from ds_hf.checkpoint.pretrained import ShardedWriter, Spec, floating, main_dtype
from ds_hf.engine.checkpoint.agreement import together
from ds_hf.engine.checkpoint.holders import whole_value
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    aliases,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_now,
    parameter_name,
    world_of,
)
from ds_hf.engine.checkpoint.merging import Merging
from ds_hf.engine.checkpoint.weights import find_whole, named_weights, values_of
from ds_hf.engine.modules.quantized.layers import is_quantized
from ds_hf.engine.zero.buffer import unshard
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.engine.zero.packed import quantized_elsewhere
from ds_hf.errors import CheckpointError

__all__ = ["export_engine"]


def export_engine(
    engine: Checkpointable,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int | None = "5GB",
    model_folder: str | Path | None = None,
    merged: bool = False,
) -> None:
    """Write the weights of a live engine; at most one unit is gathered beside what training holds. All ranks call it.

    Args:
        dtype: of floating-point weights; default what each has in the model.
        merged: as they are without PEFT's adapters, the active ones added to their weights.
        model_folder: as for ``export_source``; default the model's own configuration, if it has one.

    Raises:
        CheckpointError: on every rank, when writing failed on rank 0, or adapters cannot be merged.
    """
    merging = _merging(engine, folder) if merged else None
    if any(is_quantized(module) for module in engine.module.modules()):
        raise CheckpointError(
            f"writing {folder}: weights are kept in 8 or 4 bits; save_16bit_model() writes what they stand for"
        )
    if (name := quantized_elsewhere(engine.module)) is not None:
        raise CheckpointError(
            f"writing {folder}: {name} is in few bits of bitsandbytes or torchao, whose scales from_pretrained would "
            "not find in these files: save the adapters (save_pretrained), or load the model in 16 bits"
        )
    world = world_of(engine)
    holders, stages = find_whole(engine, f"writing {folder}")
    first = holders.rank == 0
    specs = [spec for spec in _engine_specs(engine, dtype) if spec.name not in holders.own]
    specs += [Spec(each.name, each.shape, floating(dtype, each.dtype)) for each in stages.remote]
    if merging is not None:
        specs = [replace(spec, name=name) for spec in specs if (name := merging.name_of(spec.name)) is not None]
    writer: ShardedWriter | None = None

    def fill(place: Path) -> None:
        _write_configuration(engine, place, model_folder, main_dtype(specs))

    problem: list[BaseException] = []
    with together(world, f"preparing {folder}"):
        target = folder_of(folder, "save_dir")
        writer = ShardedWriter(target, specs, max_shard_size, fill=fill) if first else None

    def put(name: str, param: Tensor) -> None:
        write(name, whole_value(engine, holders, parameter_name(engine, param, name), param))

    def write(name: str, value: Tensor | None) -> None:
        """On rank 0; a failure waits, since the others are gathering the next unit."""
        if writer is not None and value is not None and not problem:
            try:
                writer.put(name, value)
            except Exception as error:  # everything: raised below, on every rank
                problem.append(error)

    if merging is not None:
        named = {spec.name for spec in specs}
        for name, value in named_weights(engine, dtype, merged=True):
            write(name, value if name in named else None)
    now = names_now(engine)  # without those that left the model
    for buffer in flat_buffers(engine) if stages.here and merging is None else ():
        with torch.no_grad(), unshard([buffer] if buffer.sharded else []):
            for param in buffer.owners:
                if id(param) in now:
                    put(now[id(param)], param)
    loose = stages.here and merging is None
    rest = {**loose_parameters(engine), **module_buffers(engine.module)[0]} if loose else {}
    for name, value in rest.items():
        if name not in holders.own:
            put(name, value)
    for name, value in values_of(engine, stages):
        write(name, value)
    with together(world, f"writing {target}"):
        if writer is not None:
            error = problem[0] if problem else None
            writer.__exit__(type(error) if error else None, error, None)
            if error is not None:
                raise CheckpointError(f"writing {target} failed: {error}") from error


def _merging(engine: Checkpointable, folder: str | Path) -> Merging:
    merging = Merging(engine.module)
    further = aliases(engine, names_now(engine))
    tied = next((name for name in further if merging.changes(name)), None)
    if tied is not None or engine.mesh.shape.pipe > 1:
        what = "the stages of a pipeline" if tied is None else f"{tied}, which is tied to {further[tied]}"
        raise CheckpointError(
            f"writing {folder}: adapters of {what} cannot be merged in a file; engine.named_weights(merged=True) gives "
            "tied weights one by one"
        )
    return merging


def _engine_specs(engine: Checkpointable, dtype: torch.dtype | None) -> list[Spec]:
    specs, now = [], names_now(engine)
    for buffer in flat_buffers(engine):
        for owner, slot, param in zip(buffer.owners, buffer.layout.slots, buffer.params, strict=True):
            if id(owner) in now:
                kept, shape = buffer.form_of(slot)
                shape = shape if buffer.sharded else param.shape  # it may have been resized
                specs.append(Spec(now[id(owner)], tuple(whole_shape(param, shape)), floating(dtype, kept)))
    for name, value in {**loose_parameters(engine), **module_buffers(engine.module)[0]}.items():
        specs.append(Spec(name, tuple(whole_shape(value, value.shape)), floating(dtype, value.dtype)))
    return specs


def _write_configuration(engine: Checkpointable, folder: Path, model: str | Path | None, dtype: str) -> None:
    if model is not None:
        copy_model_files(Path(model), folder, dtype)
        return
    for name in ("config", "generation_config"):
        config: Any = getattr(engine.module, name, None)
        if callable(getattr(config, "save_pretrained", None)) and (name == "config" or not _is_bare(config)):
            config.save_pretrained(folder)
    if (folder / "config.json").is_file():
        set_dtype(folder / "config.json", dtype)


def _is_bare(config: Any) -> bool:
    """Whether it is the generation configuration that every model has, derived from the model's."""
    return bool(getattr(config, "_from_model_config", False))
