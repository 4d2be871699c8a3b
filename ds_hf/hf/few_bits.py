"""What of a model of transformers a file in few bits is made of, and what a token costs before and after.

``ds-hf checkpoint convert --bits`` asks: which layers are linear is not to be seen in a checkpoint, but in the model
that its configuration builds, here without values.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hf.checkpoint.model_files import find_model_folder
from ds_hf.checkpoint.pretrained import floating
from ds_hf.checkpoint.source import Source
from ds_hf.engine.modules.linear_layers import layers_of_backbone
from ds_hf.errors import CheckpointError

__all__ = ["Cost", "Model", "cost_of", "linear_layers", "load_plain", "load_written", "model_config", "token_ids"]

_TOKENS = 16  # that are timed
_LENGTH = 512  # of a window of the text


class Cost(NamedTuple):
    """``milliseconds`` of a token, one sequence; ``loss`` a token of a text, ``None`` without one."""

    milliseconds: float
    loss: float | None


def model_config(source: Source, model_folder: Path | None) -> Any:
    """The configuration of the model that ``source`` is of, found as ``export_source`` finds it.

    Raises:
        CheckpointError: there is none that transformers knows without running code, or the weights are packed already.
    """
    from transformers import AutoConfig

    folder = find_model_folder(source.folder) if model_folder is None else model_folder
    own = source.manifest.extra.get("model_config")
    try:
        if folder is not None:
            config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        elif isinstance(own, dict) and own.get("model_type"):
            config = AutoConfig.for_model(**own)
        else:
            raise CheckpointError(
                f"{source.folder}: no config.json lies beside the checkpoint, which tells the linear layers. Convert "
                "with --model FOLDER, the folder of the model that was trained"
            )
    except (ValueError, OSError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers knows no such model: {reason}") from error
    if getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{folder or source.folder}: config.json has a quantization_config: the weights are in few bits already. "
            "Convert the folder of the model in 16 bits"
        )
    return config


class Model(NamedTuple):
    """What of a model stands in no checkpoint.

    Attributes:
        linear: names of the linear layers, each with why it stays in 16 bits, ``""`` if it need not.
        tensors: names of all parameters and buffers.
    """

    linear: dict[str, str]
    tensors: frozenset[str]


def linear_layers(config: Any, exclude: Collection[str] = (), *, packed: bool = True) -> Model:
    """What a model of transformers has of linear layers.

    Args:
        exclude: regular expressions; layers whose names have one stay as they are.
        packed: the others are going to be.

    Raises:
        CheckpointError: transformers cannot build it, or cannot load it with packed weights.
    """
    model = _empty(config)
    names = frozenset(model.state_dict())
    found = {
        name: why or ("" if type(module) is nn.Linear else f"of class {type(module).__name__}")
        for name, module, why in layers_of_backbone(model)
    }
    found = {name: "excluded" if any(re.search(each, name) for each in exclude) else why for name, why in found.items()}
    if packed:
        _check_loads(model, [name for name, why in found.items() if not why])
    return Model(found, names)


def _check_loads(model: Any, layers: Iterable[str]) -> None:
    """Raise where transformers, as it loads, looks for weights that are packed (T5 and its like)."""
    for name in layers:
        del model.get_submodule(name).weight
    try:
        model.initialize_weights()
    except AttributeError as error:
        raise CheckpointError(
            f"transformers cannot load a {type(model).__name__} whose weights are packed: {error} as it is "
            "initialized. Write 16 bits (without --bits), or leave such layers out (--exclude)"
        ) from error


def _class_of(config: Any) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or ()
    return next((found for name in names if (found := getattr(transformers, name, None))), None)


def _empty(config: Any) -> Any:
    own = _class_of(config)
    try:
        with torch.device("meta"):
            return own._from_config(config) if own else _auto().from_config(config)
    except (ValueError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot build the model of config.json: {reason}") from error


# -- what a token costs ------------------------------------------------------------------------------------------------


def load_plain(source: Source, config: Any, dtype: torch.dtype | None) -> Any:
    """The model of ``source`` with its weights as they are, or in ``dtype``, on the CPU."""
    own = _class_of(config)
    weights = list(source.weights())
    wide = floating(dtype, next((w.dtype for w in weights if w.dtype.is_floating_point), torch.float32))
    model: Any = own._from_config(config, dtype=wide) if own else _auto().from_config(config, dtype=wide)
    state = {weight.name: weight.read().to(floating(dtype, weight.dtype)) for weight in weights}
    model.load_state_dict(state, strict=False)  # without further names of what is tied
    return model.eval()


def load_written(folder: Path, config: Any) -> Any:
    """The model of a folder as transformers loads it, on the CPU."""
    model: Any = (_class_of(config) or _auto()).from_pretrained(folder, local_files_only=True)
    return model.eval()


def token_ids(folder: Path, text: Path) -> Tensor:
    """Ids ``[tokens]`` of a file's text, by the tokenizer in ``folder``.

    Raises:
        CheckpointError: there is no tokenizer, or nothing to take a loss of.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{folder} has no tokenizer for --text: save one beside the model") from error
    ids: Tensor = tokenizer(text.read_text("utf-8"), return_tensors="pt")["input_ids"][0]
    if ids.numel() < 2:
        raise CheckpointError(f"{text} has no two tokens to take a loss of")
    return ids


def _auto() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


@torch.inference_mode()
def cost_of(model: Any, text: Tensor | None) -> Cost:
    """What a token of ``model`` takes once its cache is there, the median of some, and the loss of ``text``.

    Args:
        text: ids ``[tokens]``.

    Raises:
        CheckpointError: it does not continue texts.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise CheckpointError(f"{type(model).__name__} does not continue texts: leave --time and --text out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    found = model(torch.ones((1, 8), dtype=torch.long, device=device), use_cache=True)
    cache, token, took = found.past_key_values, found.logits[:, -1:].argmax(-1), []
    for _ in range(_TOKENS + 2):
        begun = time.perf_counter()
        found = model(token, past_key_values=cache, use_cache=True)
        token = found.logits[:, -1:].argmax(-1)
        token.cpu()  # waits for the device
        took.append(time.perf_counter() - begun)
    return Cost(statistics.median(took[2:]) * 1e3, None if text is None else _loss(model, text.to(device)))


def _loss(model: Any, text: Tensor) -> float:
    """Mean cross-entropy of a token, in windows of at most 512."""
    total = count = 0.0
    for window in (text[start : start + _LENGTH] for start in range(0, len(text), _LENGTH)):
        if window.numel() > 1:
            loss = model(window[None], labels=window[None], use_cache=False).loss
            total, count = total + float(loss) * (window.numel() - 1), count + window.numel() - 1
    return total / count
