"""Weights from a checkpoint into a model that may have none yet: each process reads the slices that it holds.

``checkpoint`` is a folder or a file (safetensors as transformers writes them, a checkpoint of ds_hf, DeepSpeed or
torch.distributed), or DeepSpeed's JSON: ``{"type": ..., "checkpoints": [files], "version": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.checkpoint.format import SavedCut
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.pretrained import read_pretrained
from ds_hf.checkpoint.trust.pickled import read_pickled
from ds_hf.engine.zero.cut import Cut, cut_of, whole_shape
from ds_hf.errors import CheckpointError
from ds_hf.log import logger
from ds_hf.regular_files import TEXT_NBYTES, read_regular

__all__ = ["load_weights"]

_LISTED = 8  # names in a message


class _Saved:
    """One tensor of a checkpoint: its shape, and how a slice of it is read into flat memory."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[Tensor, Cut | None], None]) -> None:
        self.shape, self.read = shape, read


@torch.no_grad()
def load_weights(
    model: nn.Module, checkpoint: Any, *, base_dir: str = "", dtype: torch.dtype | None, device: torch.device
) -> None:
    """Fill ``model`` from ``checkpoint``; what lies on the meta device gets memory on ``device``.

    Args:
        dtype: of floating-point parameters that get memory here; ``None`` for their own.

    Raises:
        CheckpointError: it cannot be read, has other shapes, or lacks what the model has no values for.
    """
    saved = dict(_saved(checkpoint, base_dir))
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    placed: dict[int, nn.Parameter] = {}
    used, missing = set[str](), []
    for param in list(model.parameters()):
        found = next((n for each in names[id(param)] for n in _spellings(each, prefix) if n in saved), None)
        if found is None:
            missing.append(names[id(param)][0])
            continue
        used.add(found)
        placed[id(param)] = _filled(param, saved[found], found, dtype, device)
    for module in model.modules():
        for key, own in module._parameters.items():
            if own is not None and id(own) in placed:
                module._parameters[key] = placed[id(own)]
    _fill_buffers(model, saved, prefix, used, device)
    _complete(model, missing, checkpoint)
    left = [name for name in saved if name not in used and not name.endswith(("rotary_emb.inv_freq", "attn.bias"))]
    if left and not placed:
        raise CheckpointError(f"{_name(checkpoint)} has none of the model's weights, but {_shown(left)}")
    if left:
        logger.info("%s has %d tensors that the model has no place for: %s", _name(checkpoint), len(left), _shown(left))


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """As it is, and without or with the name of the base model, whose checkpoints lack it."""
    return (name, name.removeprefix(prefix), prefix + name)


def _filled(
    param: nn.Parameter, saved: _Saved, name: str, dtype: torch.dtype | None, device: torch.device
) -> nn.Parameter:
    whole = tuple(whole_shape(param, param.shape))
    if saved.shape != whole:
        raise CheckpointError(f"{name} is {list(saved.shape)} in the checkpoint, and the model's is {list(whole)}")
    wanted = dtype if dtype is not None and param.is_floating_point() else param.dtype
    flat = torch.empty(param.numel(), dtype=wanted)
    saved.read(flat, cut_of(param))
    value = flat.view(param.shape)
    if param.is_meta:
        made = nn.Parameter(value.to(device), requires_grad=param.requires_grad)
        made.__dict__.update(vars(param))
        param = made
    else:
        param.data.copy_(value)
    param._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then leaves it alone
    return param


def _fill_buffers(
    model: nn.Module, saved: Mapping[str, _Saved], prefix: str, used: set[str], device: torch.device
) -> None:
    """Buffers that the checkpoint has; those without values that it lacks are computed again by the model."""
    emptied: list[nn.Module] = []
    for path, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            full = f"{path}.{key}" if path else key
            found = next((name for name in _spellings(full, prefix) if name in saved), None)
            if buffer.is_meta:
                module._buffers[key] = buffer = torch.empty_like(buffer, device=device)
                if found is None and module not in emptied:
                    emptied.append(module)
            if found is not None and saved[found].shape == tuple(buffer.shape):
                used.add(found)
                flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
                saved[found].read(flat, None)
                buffer.copy_(flat.view(buffer.shape))
    again: Any = getattr(model, "_init_weights", None)
    for module in emptied:
        if again is None:
            raise CheckpointError(
                f"{type(module).__name__} has buffers without values, which are neither in the checkpoint nor does "
                f"{type(model).__name__} say how to compute them: make the model on the CPU"
            )
        again(module)


def _complete(model: nn.Module, missing: list[str], checkpoint: Any) -> None:
    empty = [name for name, param in model.named_parameters() if param.is_meta]
    if empty:
        raise CheckpointError(
            f"{_name(checkpoint)} lacks {_shown(empty)}, and the model was made without values (on the meta device)"
        )
    if missing:
        logger.warning("%s lacks %s, which keep the model's values", _name(checkpoint), _shown(missing))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _name(checkpoint: Any) -> str:
    return str(checkpoint) if isinstance(checkpoint, str | Path) else "the checkpoint"


# -- what there is -------------------------------------------------------------------------------------------------


def _saved(checkpoint: Any, base_dir: str) -> Iterator[tuple[str, _Saved]]:
    if isinstance(checkpoint, Mapping):
        yield from _listed(checkpoint, Path(base_dir))
        return
    path = Path(base_dir) / checkpoint if base_dir else Path(checkpoint)
    if path.suffix == ".json" and path.is_file():
        yield from _listed(_read_json(path), Path(base_dir) if base_dir else path.parent)
    elif path.suffix in (".bin", ".pt", ".pth") and path.is_file():
        yield from _of_pickle(path)
    else:
        yield from _of_source(open_source(path))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_regular(path, TEXT_NBYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no object with a list of files")
    if isinstance(content.get("weight_map"), dict):  # transformers' index
        return {"checkpoints": sorted(set(map(str, content["weight_map"].values())))}
    return content


def _listed(content: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, _Saved]]:
    """DeepSpeed's list of files."""
    files = content.get("checkpoints")
    if isinstance(files, Mapping) or content.get("parallelization") == "tp":
        raise CheckpointError(
            "the checkpoint is a list of parts that tensor-parallel processes wrote for themselves: give the whole "
            "weights, of which each process reads what it needs"
        )
    if not isinstance(files, list | str) or not files:
        raise CheckpointError('the checkpoint names no files: {"checkpoints": ["file", ...]}')
    for file in [files] if isinstance(files, str) else files:
        path = folder / str(file[0] if isinstance(file, list) and file else file)
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        if path.is_dir():
            yield from _of_source(open_source(path))
        elif path.suffix == ".safetensors":
            yield from _of_source(read_pretrained(path))
        else:
            yield from _of_pickle(path)


def _of_source(source: Any) -> Iterator[tuple[str, _Saved]]:
    source.check()
    files, found = source.files, {}
    for name, parameter in source.manifest.parameters.items():

        def read(flat: Tensor, cut: Cut | None, parameter: Any = parameter) -> None:
            files.fill(
                flat, parameter, parameter.value_state, 0, None if cut is None else SavedCut(cut.dim, cut.ranges)
            )

        found[name] = _Saved(tuple(parameter.shape), read)
    for name, buffer in source.manifest.buffers.items():
        found[name] = _of_tensor(files.buffer(buffer))
    found.update({alias: found[name] for alias, name in source.manifest.tied.items() if name in found})
    yield from found.items()


def _of_pickle(path: Path) -> Iterator[tuple[str, _Saved]]:
    content: Any = read_pickled(path)
    for key in ("module", "state_dict", "model"):
        if isinstance(content.get(key), dict):
            content = content[key]
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield str(name), _of_tensor(value)


def _of_tensor(value: Tensor) -> _Saved:
    def read(flat: Tensor, cut: Cut | None) -> None:
        flat.copy_((value if cut is None else cut.take(value)).reshape(-1))

    return _Saved(tuple(value.shape), read)
