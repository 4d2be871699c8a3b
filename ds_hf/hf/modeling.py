"""Hooks on ``transformers.modeling_utils``: what loading and counting at stage 3 leave out.

Tensor parallelism: transformers refuses to load where the configuration asks for it, for DeepSpeed cuts layers earlier
than ds_hf, which does when training starts.

Weights whose shape is not the model's: transformers has them neither passed over (``ignore_mismatched_sizes``) nor
refused on all ranks - the first raises, the others wait for ever. The shapes are compared before anything is loaded.

Names. A file may have those of an older release, which transformers translates, and writes again in a save. At stage 3
it keeps every translation that it knows, used or not: a BERT would be saved with ``gamma`` and ``beta`` for norms.

Initialisation. After loading, transformers runs every ``_init_weights`` and relies on its ``init`` functions to
pass over what was loaded. Several models look at the shape of a loaded parameter first (Whisper's and DistilBert's
sinusoids, ResNet's fan-in), which at stage 3 would be that of a placeholder. So each module's parameters, and its
children's, are gathered while it runs, as transformers itself does for models that are not loaded. Memory: one module.
What it draws is kept, also of a model that a script builds under ``zero.Init`` without transformers' knowledge
(Lightning's ``configure_model``): without that, such a model would begin with the values of torch's layers.

Tying. A checkpoint may have a tensor of its own for each of two weights that the configuration ties; transformers
compares them, and ties equal ones. At rest all are equal, so they are gathered for that.

Weight norm in models from scratch: ``_init_weights`` writes to a weight that is computed, and only what the layer's
constructor drew stays; at stage 3 that is switched off, so it is drawn afterwards.

Resizing. A frozen embedding that ``resize_token_embeddings`` made has rows that no file has: it is marked, and
checkpoints of adapters hold it, as the adapter's own file does.

``num_parameters`` adds up ``numel()``, which is 0 of a parameter at rest and a part of one that is cut; the Trainer's
``total_flos`` and the index of a model saved in several files are made of it.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ds_hf.engine.zero.at_rest import Released
from ds_hf.engine.zero.buffer import buffers_of, logical_shape
from ds_hf.engine.zero.cut import is_cut, whole_shape
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.param_names import mark_resized
from ds_hf.engine.zero.replicas import expert_processes
from ds_hf.errors import DsHfError
from ds_hf.hf.autoload import wrap
from ds_hf.log import warn_once

__all__ = ["whole_weights", "wrap_modeling"]

# Of parameters that are divided, by id: what a Trainer is about to write.
_whole: ContextVar[Mapping[int, Tensor]] = ContextVar("ds_hf_whole_weights", default=MappingProxyType({}))


@contextmanager
def whole_weights(whole: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, ``save_pretrained`` of a model at stage 3 without ``state_dict`` writes these, by id of a parameter."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def wrap_modeling(module: ModuleType) -> None:
    """Hook of ``transformers.modeling_utils``."""
    wrap(module, "PreTrainedModel.initialize_weights", _gathered)
    wrap(module, "PreTrainedModel.num_parameters", _counting_released)
    wrap(module, "PreTrainedModel.resize_token_embeddings", _marking_resized)
    wrap(module, "PreTrainedModel.tie_weights", _comparing_whole)
    wrap(module, "PreTrainedModel.save_pretrained", _whole_alone)
    integration = importlib.import_module("transformers.integrations.deepspeed")  # imported by ``module`` already
    wrap(integration, "initialize_weights_zero3", _with_parametrized)
    wrap(module, "_load_state_dict_into_zero3_model", _without_mismatched)
    if hasattr(integration, "_apply_weight_conversions_to_state_dict"):
        _convert_whole_weights(integration)


def _whole_alone(wrapped: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A process that has parts of weights would write them under the names of the whole ones; and one that writes
    nothing would convert them all the same, as if they were whole."""
    given = dict(zip(("save_directory", "is_main_process", "state_dict"), args, strict=False)) | kwargs
    if given.get("state_dict") is not None or len(args) > 3:
        return wrapped(*args, **kwargs)
    cut = next((name for name, param in model.named_parameters() if is_cut(param) or expert_processes(param) > 1), None)
    if not given.get("is_main_process", True):
        at_rest = cut is not None or any(buffer.sharded for buffer in buffers_of(model.parameters()))
        return wrapped(**given | ({"state_dict": {}} if at_rest else {}))
    if cut is not None:
        raise DsHfError(
            f"save_pretrained() of the bare model would write the part of {cut} that this process has, as if it were "
            "the whole: call engine.export_pretrained(folder) on all processes, or give state_dict="
            "accelerator.get_state_dict(engine), which is whole on the first"
        )
    whole = _whole.get()
    named = model.named_parameters()
    gone = next((name for name, param in named if isinstance(param, Released) and id(param) not in whole), None)
    if gone is not None and not (dist.is_initialized() and dist.get_rank()):  # transformers writes on the first
        raise DsHfError(
            f"save_pretrained() of the bare model would write an empty {gone}, as each process holds a part of it at "
            "ZeRO stage 3: call engine.export_pretrained(folder) on all processes, give state_dict="
            "accelerator.get_state_dict(engine), or call it inside `with deepspeed.zero.GatheredParameters("
            "list(model.parameters())):`"
        )
    if whole and any(buffer.sharded for buffer in buffers_of(model.parameters())):
        params = dict(model.named_parameters(remove_duplicate=False))
        state = {name: whole.get(id(params.get(name)), value) for name, value in model.state_dict().items()}
        return wrapped(**given | {"state_dict": state})
    return wrapped(*args, **kwargs)


def _convert_whole_weights(integration: Any) -> None:
    """Let the conversion of weights see a configuration without tensor parallelism. In newer versions it is a
    generator, which looks at it when it starts."""
    convert, configured = integration._apply_weight_conversions_to_state_dict, integration.deepspeed_config

    def without_tensor_parallelism() -> Any:
        config = configured()
        return config and {key: value for key, value in config.items() if key != "tensor_parallel"}

    @contextmanager
    def hidden() -> Iterator[None]:
        integration.deepspeed_config = without_tensor_parallelism
        try:
            yield
        finally:
            integration.deepspeed_config = configured

    def in_parts(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        with hidden():
            yield from wrapped(*args, **kwargs)

    def at_once(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with hidden():
            return wrapped(*args, **kwargs)

    wrapper = in_parts if inspect.isgeneratorfunction(convert) else at_once
    wrap(integration, "_apply_weight_conversions_to_state_dict", wrapper)


def _counting_released(
    wrapped: Callable[..., int], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    def count(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        left_out: set[str] = set()
        if exclude_embeddings:
            left_out = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        return wrapped(only_trainable, exclude_embeddings) + sum(
            whole_shape(param, logical_shape(param)).numel() - param.numel()
            for name, param in model.named_parameters()
            if name not in left_out and (param.requires_grad or not only_trainable)
        )

    return count(*args, **kwargs)


def _gathered(wrapped: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not buffers_of(model.parameters()):
        return wrapped(*args, **kwargs)
    models = [m for m in model.modules() if hasattr(m, "_initialize_weights")]  # in a composite model each has its own
    for each in models:
        each.__dict__["_initialize_weights"] = _gathering(each._initialize_weights)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for each in models:
            del each.__dict__["_initialize_weights"]


def _gathering(initialize: Any) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        params = [p for owner in (module, *module.children()) for p in owner.parameters(recurse=False)]
        drawn = [p for p in params if not getattr(p, "_is_hf_initialized", False)]  # the others were loaded
        source = next((buffer.replicas.axis.global_rank(0) for buffer in buffers_of(drawn)), 0)
        with GatheredParameters(params), GatheredParameters(drawn, modifier_rank=source):
            return initialize(module, *args, **kwargs)

    return call


def _comparing_whole(
    wrapped: Callable[..., None], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def tie(missing_keys: set[str] | None = None, *args: Any, **kwargs: Any) -> None:
        looked_at: dict[nn.Parameter, None] = {}
        if missing_keys is not None and buffers_of(model.parameters()):
            own = dict(model.named_parameters(remove_duplicate=False))
            tied = list(model.all_tied_weights_keys.items())  # type: ignore[operator, union-attr]
            for names in tied:
                if not missing_keys.intersection(names):
                    looked_at |= dict.fromkeys(own[name] for name in names if name in own)
            # A bias is padded to the rows of its weight: both are whole then, or both at rest.
            whole = [names for names in tied if any(own.get(name) in looked_at for name in names)]
            biases = (own.get(f"{name.rpartition('.')[0]}.bias") for names in whole for name in names)
            looked_at |= dict.fromkeys(bias for bias in biases if bias is not None)
        source = next((buffer.replicas.axis.global_rank(0) for buffer in buffers_of(looked_at)), 0)
        with GatheredParameters(list(looked_at), modifier_rank=source):
            wrapped(missing_keys, *args, **kwargs)

    tie(*args, **kwargs)


def _without_mismatched(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def load(model_to_load: nn.Module, state_dict: dict[str, Tensor], load_config: Any = None) -> Any:
        faults = dict(_mismatched(model_to_load, state_dict))
        if getattr(load_config, "ignore_mismatched_sizes", False):
            kept = {name: value for name, value in state_dict.items() if name not in faults}
            _log_passed_over(faults)
            loaded = wrapped(model_to_load, kept, load_config)
            _keep_used_names(model_to_load, load_config)
            return loaded
        errors, missing = wrapped(model_to_load, {**state_dict}, load_config)
        _keep_used_names(model_to_load, load_config)
        return (errors or list(faults.values())), missing

    return load(*args, **kwargs)


def _marking_resized(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = [logical_shape(param) for param in _of_tokens(model)]
    result = wrapped(*args, **kwargs)
    after = list(_of_tokens(model))
    if [logical_shape(param) for param in after] != before:
        for param in after:
            mark_resized(param)
    return result


def _of_tokens(model: Any) -> Iterator[nn.Parameter]:
    """Parameters of the embedding and of the head, which are resized together."""
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        yield from layer.parameters() if layer is not None else ()


def _keep_used_names(model: Any, load_config: Any) -> None:
    """Only what renamed a weight of the file is undone in a save. transformers keeps that apart without ZeRO alone."""
    mapping = getattr(load_config, "weight_mapping", None)
    if mapping and all(hasattr(each, "was_used") for each in mapping):
        model._weight_conversions = [each for each in mapping if each.was_used()]


def _mismatched(model: nn.Module, state_dict: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names in ``state_dict`` whose shapes are not the model's, and what is wrong."""
    prefix = getattr(model, "base_model_prefix", "")
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state_dict.items():
        param = own.get(f"{prefix}.{name}", own.get(name))
        if param is not None and logical_shape(param) != value.shape:
            found, expected = tuple(value.shape), tuple(logical_shape(param))
            yield name, f"size mismatch for {name}: {found} in the checkpoint, {expected} in the model"


def _log_passed_over(faults: dict[str, str]) -> None:
    for fault in faults.values():
        warn_once(f"{fault}; re-initialized")


def _with_parametrized(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    model: nn.Module = args[0] if args else kwargs["model"]
    for module in model.modules():
        if is_parametrized(module):
            with torch.no_grad(), GatheredParameters(module.parameters(), modifier_rank=0):
                _draw(module)
    return result


def _draw(module: nn.Module) -> None:
    """Give the computed weights of a layer the values that torch's layers begin with."""
    assert isinstance(module.parametrizations, nn.ModuleDict)
    for name in module.parametrizations:
        weight: Tensor = getattr(module, name)
        if weight.dim() >= 2:
            setattr(module, name, nn.init.kaiming_uniform_(torch.empty_like(weight), a=math.sqrt(5)))
