"""From whatever names a model to a copy of it on the meta device, in the dtype it trains in.

A module (also one sharded by ``zero.Init``) is copied without its values; a configuration, a folder, a name in the
local cache or a short description (``llama:hidden=4096,layers=32``) becomes a causal language model, or what the
configuration's ``architectures`` says.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from types import CellType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_hf.engine.modules.positions import positions_of
from ds_hf.engine.zero.buffer import home_of, logical_shape
from ds_hf.log import warn_once
from ds_hf.memory.prediction import UnpredictableError, Workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["build", "example_inputs", "with_length", "without_values"]

META = torch.device("meta")

# short names in a description -> the configuration's own
_SHORT = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "experts": "num_local_experts",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # by family
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")


def build(source: str | Path | PretrainedConfig, workload: Workload) -> nn.Module:
    """The model that ``source`` names, on the meta device, as transformers builds it for training.

    Raises:
        UnpredictableError: there is no such model, or transformers cannot build it.
    """
    config = _described(str(source)) if isinstance(source, str | Path) else copy.deepcopy(source)
    name = str(source) if isinstance(source, str | Path) else type(config).__name__
    _check_experts(config, name)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    attention = workload.attention
    if attention and attention.startswith("flash"):
        attention = "sdpa"  # keeps the same; the package may not be installed here
    options = {"attn_implementation": attention} if attention else {}
    try:
        with META:
            model: nn.Module = _model_class(config)._from_config(config, **options)
    except Exception as error:  # whatever a model's constructor raises of numbers that do not go together
        raise UnpredictableError(f"{name}: transformers cannot build {_architecture(config)}: {error}") from error
    _tell_other_class(model, config, name)
    return model.train()


def _described(text: str) -> PretrainedConfig:
    """A configuration from a folder, a name or a description."""
    from transformers import AutoConfig

    kind, colon, rest = text.partition(":")
    if colon and not os.path.exists(text):  # Path would tell that it is too long for a file
        return _from_description(kind, rest, text)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(text)
    except Exception as error:  # transformers and huggingface_hub have classes of their own for a wrong file
        if os.path.isfile(os.path.join(text, "config.json")):
            raise UnpredictableError(f"{text}: its config.json is no model's: {_reason(error)}") from error
        hint = "give a folder with a config.json, a name in the local cache, a .py script, or llama:hidden=4096,..."
        raise UnpredictableError(f"cannot find the model {text!r}: {_reason(error)}\n  {hint}") from error
    return config


def _reason(error: Exception) -> str:
    """The first sentence of what may go on with advice; a line that ends in a colon has its reason in the next one."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    while first.endswith(":") and more:
        first = f"{first} {more.pop(0).strip()}"
    return first


def _from_description(kind: str, rest: str, text: str) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise UnpredictableError(
            f"{text}: transformers does not know the model type {kind!r} (llama, qwen2, gpt2, bert, ...)"
        )
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UnpredictableError(f"{text}: {pair!r} is not of the form key=value")
        name, number = _SHORT.get(key.strip(), key.strip()), _number(value.strip())
        if name in _SHORT.values() and type(number) is int and number < 1:
            raise UnpredictableError(f"{text}: {pair!r}: sizes are whole numbers from 1 on")
        values[name] = number
    known = CONFIG_MAPPING[kind]()
    if "num_local_experts" in values and not hasattr(known, "num_local_experts"):
        own = next((name for name in _EXPERTS if hasattr(known, name)), "num_local_experts")
        values[own] = values.pop("num_local_experts")
    for key in values:
        if not hasattr(known, key):
            short = ", ".join(_SHORT)
            raise UnpredictableError(f"{text}: a {kind} configuration has no {key!r}; short names: {short}")
    try:
        config: PretrainedConfig = CONFIG_MAPPING[kind](**values)
    except Exception as error:  # values that do not go together
        raise UnpredictableError(f"{text}: {' '.join(str(error).split())}") from error
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _check_experts(config: PretrainedConfig, text: str) -> None:
    """What a router says itself only in an operation's words, and some not before they have values."""
    experts = next((count for name in _EXPERTS if isinstance(count := getattr(config, name, None), int)), None)
    for name in _PER_TOKEN:
        chosen = getattr(config, name, None)
        if experts and isinstance(chosen, int) and not 0 < chosen <= experts:
            raise UnpredictableError(
                f"{text}: a token goes to {chosen} experts ({name}), and there are {experts}: add {name}={experts}, or "
                "less, from 1 on"
            )


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    scale = {"k": 1024, "m": 1 << 20}.get(text[-1:].lower())
    for convert in (int, float):
        try:
            return convert(text[:-1]) * scale if scale else convert(text)
        except ValueError:
            continue
    return text


def _architecture(config: PretrainedConfig) -> str:
    names = getattr(config, "architectures", None) or ["a causal language model"]
    return str(names[0])


def _model_class(config: PretrainedConfig) -> Any:
    """What ``architectures`` names, if it computes a loss; else what the type is trained as."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None and "For" in name:
            return found
    both_sides = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    one_side = (
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    )
    for mapping in both_sides if getattr(config, "is_encoder_decoder", False) else one_side:
        if type(config) in mapping:
            return mapping[type(config)]
    raise UnpredictableError(f"{type(config).__name__}: transformers has no model with a loss for it")


def _tell_other_class(model: nn.Module, config: PretrainedConfig, text: str) -> None:
    """Where ``model`` is of another class than ``architectures`` names."""
    named = getattr(config, "architectures", None) or ()
    if named and type(model).__name__ not in named:
        import transformers

        why = "it computes no loss" if hasattr(transformers, named[0]) else "transformers has no class of that name"
        warn_once(f"{text}: its configuration names {named[0]}, but {why}; {type(model).__name__} is predicted instead")


def without_values(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device; neither it nor its values are touched.

    Raises:
        UnpredictableError: it holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        home = home_of(param)
        dtype = param.dtype if home is None else home.buffer.dtype
        value = torch.empty(logical_shape(param), dtype=dtype, device=META)
        memo[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnpredictableError(f"{type(model).__name__} cannot be copied to the meta device: {error}") from error
    for module in copied.modules():
        if _calls_another(vars(module).get("forward")):
            del module.forward
    return copied


def _calls_another(forward: Any) -> bool:
    """Whether a ``forward`` that was put on a module (TRL's losses do) remembers a method of one, which no copy binds
    anew: the copy would compute with the weights of the original."""
    cells = getattr(getattr(forward, "__func__", forward), "__closure__", None) or ()
    filled = [cell.cell_contents for cell in cells if cell != CellType()]
    return any(isinstance(getattr(value, "__self__", None), nn.Module) for value in filled)


def example_inputs(model: nn.Module, workload: Workload) -> dict[str, Any]:
    """Keyword arguments of ``model``'s forward on the meta device, of ``workload``'s shape.

    Raises:
        UnpredictableError: what the model takes is not known.
    """
    if workload.inputs is not None:
        return {key: _resized(value, workload.micro_batch) for key, value in workload.inputs.items()}
    config = getattr(model, "config", None)
    if config is None:
        raise UnpredictableError(
            f"{type(model).__name__} is not a transformers model: give Workload(inputs={{...}}), a batch of its forward"
        )
    batch, length = workload.micro_batch, _possible_length(model, workload.seq_len)
    tokens = torch.zeros(batch, length, dtype=torch.long, device=META)
    name = getattr(model, "main_input_name", "input_ids")
    inputs: dict[str, Any] = {name: tokens if name == "input_ids" else _signal(config, name, batch)}
    task = type(model).__name__
    if task.endswith(("SequenceClassification", "ImageClassification", "AudioClassification", "MultipleChoice")):
        inputs["labels"] = torch.zeros(batch, dtype=torch.long, device=META)
    elif task.endswith("QuestionAnswering"):
        inputs["start_positions"] = inputs["end_positions"] = torch.zeros(batch, dtype=torch.long, device=META)
    else:
        inputs["labels"] = tokens
    return inputs


def with_length(inputs: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """The batch with sequences of ``new`` tokens where they had ``old``."""

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        shape = [value.shape[0], *(new if size == old else size for size in value.shape[1:])]
        return torch.empty(shape, dtype=value.dtype, device=META)

    return {name: resized(value) for name, value in inputs.items()}


def _possible_length(model: nn.Module, length: int) -> int:
    """As long as the model's positions allow, where it has a table of them."""
    limit = positions_of(model)
    if limit is not None and length > limit:
        raise UnpredictableError(f"a sequence of {length} tokens is more than the model's {limit} positions")
    return length


def _signal(config: Any, name: str, batch: int) -> Tensor:
    """Pixels or audio features."""
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        if isinstance(size, int):
            return torch.zeros(batch, getattr(config, "num_channels", 3), size, size, device=META)
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        return torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions, device=META)
    raise UnpredictableError(f"what the model takes as {name!r} is not known: give Workload(inputs={{...}})")


def _resized(value: Any, batch: int) -> Any:
    """A tensor of the same shape with ``batch`` samples, on the meta device; nests of them too."""
    if isinstance(value, Tensor):
        shape = (batch, *value.shape[1:]) if value.dim() else ()
        return torch.empty(shape, dtype=value.dtype, device=META)
    if isinstance(value, Mapping):
        return {key: _resized(item, batch) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resized(item, batch) for item in value)
    return value
