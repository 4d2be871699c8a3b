"""Weights of a model of transformers for one stage: the model on the meta device, and its files, a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hf.checkpoint.pretrained import INDEX, SINGLE, is_pretrained, open_weights, weight_files, weights_in
from ds_hf.errors import ConfigError

__all__ = ["WHERE", "load", "shell"]

WHERE = "PipelineModule.from_transformers(...)"


def shell(given: Any) -> tuple[Any, Path | str | None]:
    """A model, on the meta device unless it was given, and where its weights are."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
    from transformers.configuration_utils import PreTrainedConfig

    if isinstance(given, PreTrainedModel):
        return given, None
    if isinstance(given, PreTrainedConfig):
        config, folder = given, None
    elif isinstance(given, str | Path):
        config, folder = AutoConfig.from_pretrained(given), given
    else:
        kind, inner = type(given).__name__, getattr(given, "get_base_model", None)  # of PEFT
        hint = ": give model.get_base_model(), which has the adapters in it" if inner is not None else ""
        raise ConfigError(f"give a model, a configuration, or a folder of transformers, not {kind}{hint}", WHERE)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return made, folder


def load(module: nn.Module, folder: Path | str, prefix: str) -> None:
    """Read the weights of this stage, one tensor at a time, from safetensors."""
    files = dict(_files(folder))
    own = {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in module.state_dict()}}
    missing, by_file = [], dict[Path, list[tuple[str, str]]]()
    for name in own:
        candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        stored = next((each for each in candidates if each in files), None)
        if stored is None:
            missing.append(name)
        else:
            by_file.setdefault(files[stored], []).append((name, stored))
    if missing:
        raise ConfigError(
            f"{folder} has no {', '.join(missing[:4])}{' and others' if len(missing) > 4 else ''}: load the model with "
            "from_pretrained(), which converts names, and give it instead",
            WHERE,
        )
    for path, names in by_file.items():
        with open_weights(path) as file, torch.no_grad():
            for name, stored in names:
                value = file.get_tensor(stored)
                if tuple(value.shape) != tuple(own[name].shape):
                    raise ConfigError(f"{stored} in {path} is {list(value.shape)}, not {list(own[name].shape)}", WHERE)
                own[name].data = value.to(own[name].device)


def _files(folder: Path | str) -> Iterator[tuple[str, Path]]:
    """Names of the tensors of a folder or a model of the Hub, each with its file."""
    place = Path(folder)
    if not place.is_dir():
        place = _in_cache(folder)
    if not is_pretrained(place):
        raise ConfigError(f"{folder} has no model.safetensors, nor an index of several", WHERE)
    yield from weights_in(place)


def _in_cache(model: Path | str) -> Path:
    """The folder of the Hub's cache that has the weights of a model; what is not there yet is fetched."""
    from transformers.utils.hub import cached_file

    def found(name: str) -> str | None:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False)

    single = found(SINGLE)
    index = found(INDEX) if single is None else None
    for name in weight_files(Path(index).parent)[0] if index is not None else ():
        found(name)
    return Path(single or index or model).parent
