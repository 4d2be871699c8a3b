"""Whole weights as transformers loads them, from a checkpoint or from a live engine, one unit in memory at a time.

Both plan every file from shapes alone and then fill the files tensor by tensor, so nothing else is ever gathered.
Further names of tied weights are left out, as ``save_pretrained`` does: ``from_pretrained`` ties them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.model_files import copy_model_files, find_model_folder, require_config, set_dtype
from ds_hf.checkpoint.pretrained import ShardedWriter, Spec
from ds_hf.checkpoint.source import Report, Source
from ds_hf.checkpoint.zero_to_fp32 import folder_of, publish_weights, weights_aside
from ds_hf.dtypes import name_of
from ds_hf.engine.checkpoint.agreement import together
from ds_hf.engine.checkpoint.holders import find_holders, whole_value
from ds_hf.engine.checkpoint.interface import (
    Checkpointable,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_of,
    world_of,
)
from ds_hf.engine.checkpoint.stages import find_stages, values_of
from ds_hf.engine.quantized.layers import is_quantized
from ds_hf.engine.zero.buffer import unshard
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.errors import CheckpointError

__all__ = ["export_engine", "export_source", "write_single"]


def _floating(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def export_source(
    source: Source,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int | None = "5GB",
    model_folder: str | Path | None = None,
    report: Report | None = None,
) -> list[str]:
    """Write the weights of a checkpoint as ``model*.safetensors``; one tensor is in memory at a time.

    Args:
        dtype: of floating-point weights; default what each had in the model.
        model_folder: where ``config.json``, the generation configuration, the tokenizer and a model's own code are
            copied from; default a folder beside the checkpoint that has them, see ``find_model_folder``.

    Returns:
        what was copied.

    Raises:
        CheckpointError: the checkpoint is damaged; what was in ``folder`` is as it was.
    """
    if model_folder is not None:
        require_config(Path(model_folder))
    source.check()
    weights = list(source.weights())
    specs = [Spec(w.name, w.shape, _floating(dtype, w.dtype)) for w in weights]
    found = find_model_folder(source.folder) if model_folder is None else Path(model_folder)
    copied: list[str] = []

    def fill(place: Path) -> None:
        if found is not None:
            copied.extend(copy_model_files(found, place, _main_dtype(specs), links=model_folder is not None))

    with ShardedWriter(Path(folder), specs, max_shard_size, report=report, fill=fill) as writer:
        for weight in weights:
            writer.put(weight.name, weight.read())
    return copied


def write_single(
    source: Source, path: str | Path, *, dtype: torch.dtype | None = torch.float32, report: Report | None = None
) -> None:
    """Write all weights into one file: streamed if it is ``.safetensors``, otherwise pickled by torch.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    source.check()
    path = Path(path)
    weights = list(source.weights())
    if path.suffix == ".safetensors":
        specs = [Spec(w.name, w.shape, _floating(dtype, w.dtype)) for w in weights]
        further = dict(source.manifest.tied)  # as safetensors.torch.load_model wants it
        with ShardedWriter(path.parent, specs, single=path.name, metadata=further, report=report) as writer:
            for weight in weights:
                writer.put(weight.name, weight.read())
        return
    state: dict[str, Tensor] = {}
    total = sum(torch.Size(w.shape).numel() for w in weights)
    for weight in weights:
        value = weight.read()
        state[weight.name] = value.to(_floating(dtype, value.dtype))
        if report is not None:
            report(sum(tensor.numel() for tensor in state.values()), total)
    state.update({alias: state[name] for alias, name in source.manifest.tied.items() if name in state})
    with weights_aside(path.parent) as aside:
        torch.save(state, aside / path.name)
        publish_weights(aside, path.parent, [path.name], sole=False)


def export_engine(
    engine: Checkpointable,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int | None = "5GB",
    model_folder: str | Path | None = None,
) -> None:
    """Write the weights of a live engine; at most one unit is gathered beside what training holds. All ranks call it.

    Args:
        dtype: of floating-point weights; default what each has in the model.
        model_folder: as for ``export_source``; default the model's own configuration, if it has one.

    Raises:
        CheckpointError: on every rank, when writing failed on rank 0.
    """
    if any(is_quantized(module) for module in engine.module.modules()):
        raise CheckpointError(
            f"writing {folder}: weights are kept in 8 or 4 bits; save_16bit_model() writes what they stand for"
        )
    holders, world = find_holders(engine), world_of(engine)
    holders.check(engine, f"writing {folder}")
    stages = find_stages(engine, holders)
    if not stages.remote:
        holders.check_first()
    first = holders.rank == 0
    specs = [spec for spec in _engine_specs(engine, dtype) if spec.name not in holders.own]
    specs += [Spec(each.name, each.shape, _floating(dtype, each.dtype)) for each in stages.remote]
    writer: ShardedWriter | None = None

    def fill(place: Path) -> None:
        _write_configuration(engine, place, model_folder, _main_dtype(specs))

    problem: list[BaseException] = []
    with together(world, f"preparing {folder}"):
        target = folder_of(folder, "save_dir")
        writer = ShardedWriter(target, specs, max_shard_size, fill=fill) if first else None

    def put(name: str, param: Tensor) -> None:
        write(name, whole_value(engine, holders, name, param))

    def write(name: str, value: Tensor | None) -> None:
        """On rank 0; a failure waits, since the others are gathering the next unit."""
        if writer is not None and value is not None and not problem:
            try:
                writer.put(name, value)
            except Exception as error:  # everything: raised below, on every rank
                problem.append(error)

    for buffer in flat_buffers(engine) if stages.here else ():
        with torch.no_grad(), unshard([buffer] if buffer.sharded else []):
            for name, param in zip(names_of(engine, buffer), buffer.owners, strict=True):
                put(name, param)
    rest = {**loose_parameters(engine), **module_buffers(engine.module)[0]} if stages.here else {}
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


def _engine_specs(engine: Checkpointable, dtype: torch.dtype | None) -> list[Spec]:
    specs = []
    for buffer in flat_buffers(engine):
        for name, slot, param in zip(names_of(engine, buffer), buffer.layout.slots, buffer.params, strict=True):
            specs.append(Spec(name, tuple(whole_shape(param, slot.shape)), _floating(dtype, buffer.dtype)))
    for name, value in {**loose_parameters(engine), **module_buffers(engine.module)[0]}.items():
        specs.append(Spec(name, tuple(whole_shape(value, value.shape)), _floating(dtype, value.dtype)))
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


def _main_dtype(specs: Sequence[Spec]) -> str:
    """The floating-point dtype that most elements have."""
    sizes: dict[torch.dtype, int] = {}
    for spec in specs:
        if spec.dtype.is_floating_point:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + torch.Size(spec.shape).numel()
    return name_of(max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32))
