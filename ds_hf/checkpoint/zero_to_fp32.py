"""Reads a checkpoint and turns it into whole fp32 weights:  zero_to_fp32.py CHECKPOINT OUT

A copy lies in every checkpoint, put together of the parts that read our format (``standalone.py``). It needs nothing
but torch and safetensors; run your own copy on a stranger's checkpoint, not his.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_hf.checkpoint.aside import in_shards, publish_weights, weights_aside
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.formats import open_whole
from ds_hf.checkpoint.places import folder_of
from ds_hf.checkpoint.tensors import TensorFiles
from ds_hf.dtypes import torch_dtype
from ds_hf.errors import CheckpointError
from ds_hf.printable import printable

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "to_torch_tensor",
    "write_shard",
]


@dataclass(frozen=True)
class LazyTensor:
    """A parameter that is read when ``contiguous()`` is called."""

    files: TensorFiles
    parameter: SavedParameter
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.parameter.shape)

    def numel(self) -> int:
        return self.parameter.numel

    def contiguous(self) -> Tensor:
        return self.files.value(self.parameter, self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Whole weights on the CPU, floating-point ones in fp32, with buffers; tied names share one tensor.

    Args:
        checkpoint_dir: folder given to ``save_checkpoint``, or the checkpoint's own.
        tag: default what ``latest`` names.
        exclude_frozen_parameters: leave out what did not train.
        lazy_mode: parameters are objects whose ``contiguous()`` reads them.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
    """
    return _whole_state(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode, torch.float32)


def _whole_state(
    checkpoint_dir: str | Path, tag: str | None, exclude_frozen_parameters: bool, lazy_mode: bool, dtype: torch.dtype
) -> dict[str, Any]:
    manifest, files = open_whole(checkpoint_dir, tag)
    state: dict[str, Any] = {}
    parameters = manifest.parameters.items()
    manifest.refuse_blocks(n for n, p in parameters if p.trainable or not exclude_frozen_parameters)
    for name, parameter in parameters:
        if parameter.trainable or not exclude_frozen_parameters:
            state[name] = LazyTensor(files, parameter, dtype) if lazy_mode else files.value(parameter, dtype)
    for name, buffer in manifest.buffers.items():
        value = files.buffer(buffer)
        state[name] = value.to(dtype) if value.is_floating_point() else value
    state.update({alias: state[name] for alias, name in manifest.tied.items() if name in state})
    return state


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Give ``model`` the checkpoint's weights, on the CPU, each in the dtype that it has there, and return it.

    A model that an engine holds becomes an ordinary one; destroy that engine before using the model.

    Raises:
        CheckpointError: the checkpoint is unusable, or a shape does not fit.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    loaded: set[int] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        value = state.get(name)
        if value is None or id(param) in loaded:
            continue
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if shape != tuple(value.shape):
            raise CheckpointError(f"{name} has shape {shape} in the model and {tuple(value.shape)} in the checkpoint")
        loaded.add(id(param))
        if hasattr(param, "_ds_home"):
            param._ds_home.leave(param)
        param.data = value.to(param.dtype, copy=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in state:
            buffer.copy_(state[name])
    return model.cpu()


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: str | torch.dtype | None = None
) -> dict[str, Tensor]:
    """Tensors out of a state dict that may be lazy; names that shared one still do.

    Args:
        return_empty_tensor: uninitialized tensors of the same shapes, without reading any.
        dtype: of floating-point tensors, such as ``"bf16"``; default as they are.

    Raises:
        ValueError: it is not a dtype of weights.
    """
    wanted = None if dtype is None else _dtype(dtype)
    made: dict[int, Tensor] = {}
    for value in state_dict.values():
        if id(value) in made:
            continue
        kind = value.dtype if wanted is None or not value.dtype.is_floating_point else wanted
        made[id(value)] = torch.empty(value.shape, dtype=kind) if return_empty_tensor else value.contiguous().to(kind)
    return {name: made[id(value)] for name, value in state_dict.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``convert_zero_checkpoint_to_state_dict`` with ``dtype="fp32"``."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, "fp32", max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = "fp32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write whole weights as transformers reads them, one shard in memory at a time.

    Args:
        output_dir: a folder, or the path of one file that ends in ``.bin``, ``.pt``, ``.pth`` or ``.safetensors``.
        dtype: of floating-point weights: ``"fp32"``, ``"fp16"``, ``"bf16"``.
        max_shard_size: such as ``"5GB"``; larger weights are split, with an index beside them. Not for one file.
        safe_serialization: safetensors instead of pickled files, in a folder.

    Raises:
        ValueError: ``dtype`` or ``max_shard_size`` is neither of these.
    """
    out = folder_of(output_dir, "the output")
    state = _whole_state(checkpoint_dir, tag, exclude_frozen_parameters, True, _dtype(dtype))
    _refuse_links(out, Path(checkpoint_dir))
    if out.suffix in (".bin", ".pt", ".pth", ".safetensors"):
        with weights_aside(out.parent) as aside:
            write_shard(aside / out.name, list(state), state)
            publish_weights(aside, out.parent, [out.name], sole=False)
        return
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    shards = _split(state, max_shard_size)
    with weights_aside(out) as aside:
        if len(shards) == 1:
            write_shard(aside / f"{stem}{suffix}", shards[0], state)
            publish_weights(aside, out, [f"{stem}{suffix}"])
            return
        index: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
            index.update(dict.fromkeys(write_shard(aside / file, names, state), file))
        total = sum(_size_of(value) for value in {id(state[name]): state[name] for name in index}.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        publish_weights(aside, out, list(dict.fromkeys(index.values())), content)


def _refuse_links(out: Path, checkpoint: Path) -> None:
    """A stranger's folder may have a link where the output is likely to be wanted, to files that are not his."""
    home = checkpoint.absolute()
    for path in (out.absolute(), *out.absolute().parents):
        if home in path.parents and path.is_symlink():
            raise CheckpointError(f"{path} is a link out of the checkpoint: write somewhere else")


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = given if isinstance(given, torch.dtype) else torch_dtype(given.lower())
    if found not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{given!r} is not a dtype of weights: use fp32, fp16 or bf16")
    return found


def _size_of(value: Any) -> int:
    return int(value.numel()) * int(value.dtype.itemsize)


def _split(state: Mapping[str, Any], most: str | int | None) -> list[list[str]]:
    """Names of each shard in order; tied names stay with their tensor."""
    together: dict[int, list[str]] = {}
    for name, value in state.items():
        together.setdefault(id(value), []).append(name)
    shards = in_shards(((names, _size_of(state[names[0]])) for names in together.values()), most)
    return [[name for names in shard for name in names] for shard in shards]


def write_shard(path: Path, names: list[str], state: Mapping[str, Any]) -> list[str]:
    """Write the tensors of ``names`` and return the names under which they are in the file."""
    made: dict[int, Tensor] = {}
    for name in names:
        if id(state[name]) not in made:
            made[id(state[name])] = state[name].contiguous()
    content = {name: made[id(state[name])] for name in names}
    if path.suffix != ".safetensors":
        torch.save(content, path)
        return names
    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name, value in content.items():
        if first.setdefault(id(value), name) != name:
            metadata[name] = first[id(value)]  # as safetensors.torch.load_model wants it
    save_file({name: content[name] for name in first.values()}, path, metadata)
    return list(first.values())


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Turn a ds_hf checkpoint into whole weights.")
    parser.add_argument("checkpoint_dir", help="folder given to save_checkpoint (it holds 'latest'), or the tag's own")
    parser.add_argument("output", help="folder for model.safetensors, or the path of one .bin or .safetensors file")
    parser.add_argument("-t", "--tag", help="default: what 'latest' names")
    parser.add_argument("--dtype", default="fp32", help="fp32 (the default), fp16 or bf16")
    parser.add_argument("--max_shard_size", "--max-shard-size", default="5GB", help="default: 5GB")
    parser.add_argument("--safe_serialization", "--safe-serialization", action="store_true", help="the default")
    parser.add_argument("--bin", action="store_true", help="write pytorch_model.bin in the folder instead")
    parser.add_argument("--exclude_frozen_parameters", "--exclude-frozen-parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_state_dict(
            args.checkpoint_dir,
            args.output,
            args.dtype,
            args.max_shard_size,
            safe_serialization=not args.bin,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError, ValueError) as error:
        if args.debug:
            raise
        sys.stderr.write(printable(f"zero_to_fp32: {error}\n"))
        return 1
    sys.stdout.write(printable(f"wrote {args.output}\n"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
