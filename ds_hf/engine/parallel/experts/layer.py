"""One layer of experts, and what speaks against dividing it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.parallel.experts.adapters import is_adapter
from ds_hf.engine.parallel.experts.compute import reads_blocks
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import Fault
from ds_hf.log import warn_once

__all__ = [
    "POINTER",
    "ExpertLayer",
    "counts_of",
    "odd",
    "odd_keys",
    "text_config",
    "unclear",
    "unfit",
    "whole_shape",
    "why_by_own",
]

POINTER = "/expert_parallel"
_COUNT = re.compile(r"(^|_)(num|n|number|count)_(\w+_)?experts?$|^experts?_(num|number|count)$")
_SILU = ("silu", "swish")
_ACTIVATIONS: dict[Any, Sequence[str]] = {  # what models call those that DeepSpeed knows
    "swiglu": _SILU,
    "swiglu_clamped": _SILU,
    "swiglu_oai": (*_SILU, "swigluoai"),
    "geglu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one block.

    Attributes:
        name, module: where they are.
        count: how many there are.
        params: names of the module's own parameters that are cut: ``[count, ...]`` each.
        said: the entry of the plan, or the key, that names them.
        beside: names of what the block has beside them, which stays whole: its router, shared experts.
        around: layers of adapters around the module, the outermost first.
    """

    name: str
    module: nn.Module
    count: int
    params: tuple[str, ...]
    said: str
    beside: tuple[str, ...] = ()
    around: tuple[nn.Module, ...] = ()


def whole_shape(module: nn.Module, name: str) -> Sequence[int]:
    param = module._parameters[name]
    assert param is not None
    cut = cut_of(param)
    return logical_shape(param) if cut is None else cut.whole


def text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def unfit(layer: ExpertLayer) -> Iterator[Fault]:
    """Of a module that cannot compute with a part of its experts."""
    module, name = layer.module, layer.name
    if (other := next((each for each in layer.around if not _is_known(each, layer)), None)) is not None:
        what = getattr(other, "parameter_name", None)
        yield Fault(
            POINTER,
            f"{type(other).__name__} around {name.removesuffix('.base_layer')} adapts "
            f"{'the module' if what is None else what}, and only LoRA of the experts' stacked weights is computed by "
            f"expert ({', '.join(layer.params)})",
            "leave it out of target_parameters and modules_to_save (adapters of other layers go with divided experts), "
            'or set "enabled": false and divide the states by ZeRO',
        )
    if not layer.params:
        fix = ""
        if hasattr(module, "modules_to_save"):
            fix = "leave it out of modules_to_save, or train all experts in their place with autoep_size 1"
        what = f"{name}, a {type(module).__name__}, has no parameter whose first dimension counts experts"
        yield Fault(POINTER, what, fix)
        return
    if getattr(module, "_is_expert_parallel", False):
        yield Fault(
            POINTER,
            f"transformers has divided {name} already (DistributedConfig(ep_size=...))",
            "load the model without distributed_config: the experts are divided when training starts",
        )
    elif "forward" in vars(module):
        message = f"the forward of {name}, a {type(module).__name__}, was replaced by {_whose(vars(module)['forward'])}"
        yield Fault(POINTER, f"{message}, which counts on all experts", "let one of the two divide the model")
    for key in layer.params:
        param = module._parameters[key]
        assert param is not None
        if (is_packed(param) or not param.is_floating_point()) and not reads_blocks(module):
            yield Fault(
                POINTER,
                f"{name}.{key} is quantized ({type(param).__name__}), and quantized experts are not divided",
                "load it without quantization: divided experts take a part of the memory already",
            )
        elif whole_shape(module, key)[0] != layer.count:
            message = f"{name}.{key} has {whole_shape(module, key)[0]} experts, and {layer.params[0]} {layer.count}"
            yield Fault(POINTER, message)
    if type(module).forward is nn.Module.forward:
        message = f"{name}, a {type(module).__name__}, has no forward: its block takes the weights and computes itself"
        fix = "call the experts as a module, with (hidden states, indices, weights), as transformers does"
        yield Fault(POINTER, message, fix)
        return
    taken = [
        each
        for each in inspect.signature(type(module).forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if len(taken) < 4 and not any(each.kind is each.VAR_POSITIONAL for each in taken):
        yield Fault(
            POINTER,
            f"{name}, a {type(module).__name__}, is called with ({', '.join(each.name for each in taken[1:])}), and "
            "experts that are divided are called with (hidden states, indices of experts, weights), each "
            "[tokens, ...]",
            "leave it out",
        )


def why_by_own(layer: ExpertLayer) -> str | None:
    """Why the layer can only compute with its own forward, ``None`` where it need not."""
    return next((fault.message for fault in unfit(layer)), None)


def _is_known(adapter: nn.Module, layer: ExpertLayer) -> bool:
    """Whether it is LoRA of one of the layer's weights, ``[experts, inputs, outputs]`` or the other way round."""
    key: Any = getattr(adapter, "parameter_name", None)
    return is_adapter(adapter) and key in layer.params and len(whole_shape(layer.module, key)) == 3


def _whose(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', 'forward')}"


def odd(layer: ExpertLayer, size: int) -> Iterator[Fault]:
    if layer.count % size:
        fits = [str(n) for n in range(1, layer.count + 1) if layer.count % n == 0]
        message = f"{layer.name} has {layer.count} experts, which {size} processes do not divide"
        yield Fault(f"{POINTER}/autoep_size", message, f"use one of {', '.join(fits)}")
    for key, buffer in layer.module.named_buffers() if size > 1 else ():
        if buffer.dim() and len(buffer) == layer.count:
            message = f"{layer.name}.{key} is a buffer with a row for each expert, and only parameters are divided"
            yield Fault(POINTER, message, "make it a parameter (requires_grad=False), or keep it in the router")


def unclear(layer: ExpertLayer) -> Iterator[Fault]:
    """Of a module without a plan what may be of single experts and is not cut, or is cut and may be of none."""
    module, name, count = layer.module, layer.name, layer.count
    known = counts_of(module)
    if known and count not in known:
        message = f"{name} counts {sorted(known)} experts itself, and {', '.join(layer.params)} has {count} rows"
        yield Fault(POINTER, message, "stack its weights as [experts, outputs, inputs]")
    stacked = [whole_shape(module, key) for key in layer.params if len(whole_shape(module, key)) > 2]
    widths = {size for shape in stacked for size in shape[1:]}
    for key in layer.params:
        if count in widths and len(whole_shape(module, key)) < 3:
            message = f"{name}.{key} has {count} rows, and {count} is the number of experts and a width of theirs"
            fix = "give it three dimensions, [experts, 1, width], or keep what all experts have in common in the block"
            yield Fault(POINTER, f"{message}: whether it has a row for each expert cannot be told", fix)
    cut = {id(module._parameters[key]) for key in layer.params}
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        at = logical_shape(tensor) if isinstance(tensor, nn.Parameter) else tensor.shape
        if id(tensor) in cut or count not in (at if count not in widths else at[:1]):
            continue
        if at[0] != count:
            message = (
                f"{name}.{key} {list(at)} has a dimension of {count}, the number of experts, that is not the first"
            )
            yield Fault(POINTER, message, "stack what is of single experts along the first dimension")
        elif isinstance(tensor, nn.Parameter):
            message = f"{name}.{key} {list(at)} lies in a module inside of the experts, where nothing is divided"
            yield Fault(POINTER, message, f"make it a parameter of {name} itself")


def counts_of(module: nn.Module) -> set[int]:
    """What a module says of how many experts it has."""
    own = vars(module).items()
    return {value for key, value in own if type(value) is int and _COUNT.search(key) and "per_tok" not in key}


def odd_keys(layer: ExpertLayer, model: nn.Module, section: ExpertParallelSection) -> Iterator[Fault]:
    """Keys about the router that say something else than the model, whose own router chooses: they would be ignored."""
    config = text_config(model)
    value: Any
    names: tuple[str, ...]
    for key, value, names in (
        ("top_k", section.top_k, ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "moe_top_k")),
        ("route_norm", section.route_norm, ("norm_topk_prob",)),
        ("num_expert_groups", section.num_expert_groups, ("n_group",)),
        ("num_limited_groups", section.num_limited_groups, ("topk_group",)),
        ("routed_scaling_factor", section.routed_scaling_factor, ("routed_scaling_factor",)),
        ("route_scale", None if section.route_scale == 1 else section.route_scale, ("routed_scaling_factor",)),
        ("score_func", section.score_func, ("scoring_func",)),
        ("expert_activation", section.expert_activation, ("hidden_act", "hidden_activation", "mlp_hidden_act")),
    ):
        names = ((section.top_k_attr,) if key == "top_k" and section.top_k_attr else ()) + names
        own = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        if value is None or value == "auto" or own == value or own in _ACTIVATIONS.get(value, ()):
            continue
        if own is None and key == "route_scale":
            own = 1.0
        if own is None:
            warn_once(
                f"{POINTER}/{key} is {value}, which changes nothing: the model's own router chooses, and its "
                f"configuration has no {names[0]} to compare"
            )
            continue
        who = "router, which chooses" if key != "expert_activation" else "activation, which computes"
        message = f"{key} is {value}, and the model's own {who} here too, has {own}"
        fix = "remove it" if key == "expert_activation" else f"set {key} to {own}"
        yield Fault(f"{POINTER}/{key}", message, f"change the model's configuration, or {fix}")
