"""Which modules of a model hold its experts, from the model's own plan or from patterns of the file.

A model of transformers says it in ``config.base_model_ep_plan``: the parameters whose first dimension counts experts
(``grouped_gemm``); the modules that have them are given tokens, their experts and weights. What else a plan has is of
tensor parallelism, or of how a release of transformers dispatches. ``expert_parallel.moe_layer_pattern`` and its
companions say it of other models.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.parallel.experts.adapters import is_adapter
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["POINTER", "ExpertLayer", "any_number", "plan_experts"]

POINTER = "/expert_parallel"
_BESIDE = ("expert_pattern", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr")


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


def plan_experts(model: nn.Module, section: ExpertParallelSection, size: int) -> list[ExpertLayer]:
    """The layers of experts of ``model``, which are to be divided over ``size`` processes: with one those that can be
    computed otherwise than by their own forward. Changes nothing, and is the same on all processes.

    Raises:
        ConfigError: with all faults: no experts, numbers that do not divide, modules that cannot be divided.
    """
    faults: list[Fault] = []
    patterns = section.moe_layer_pattern is not None
    found = [*_by_patterns(model, section, faults)] if patterns else [*_by_plans(model)]
    if not found and not faults:
        faults.append(_no_experts(model, section))
    if not patterns and (beside := [key for key in _BESIDE if getattr(section, key) is not None]):
        warn_once(f"{POINTER}: {', '.join(beside)} changes nothing without moe_layer_pattern: the model's plan decides")
    if section.preset_model is not None and not patterns:
        faults += _other_preset(model, section.preset_model)
    said = set[str]()
    if size == 1:
        found = [layer for layer in found if not any(_unfit(layer))]
    for layer in found:
        for fault in (*_unfit(layer), *_odd(layer, size), *_odd_keys(layer, model, section)):
            if fault.message.replace(layer.name, "") not in said:  # each once, for the first of alike layers
                said.add(fault.message.replace(layer.name, ""))
                faults.append(fault)
    if faults:
        raise ConfigError(faults, "expert parallelism")
    return found


# -- where they are ------------------------------------------------------------------------------------------------


def _by_plans(model: nn.Module) -> Iterator[ExpertLayer]:
    """By the plans of the models in ``model`` (under a wrapper, an adapter, beside a vision tower)."""
    modules, done = dict(model.named_modules()), set[str]()
    for owner, module in modules.items():
        plan = getattr(getattr(module, "config", None), "base_model_ep_plan", None)
        if not isinstance(plan, Mapping):
            continue
        prefix = re.escape(getattr(module, "base_model_prefix", "") or "-")
        before = (re.escape(f"{owner}.") if owner else "") + rf"(?:{prefix}\.)?"
        stacked = [key for key, style in plan.items() if style == "grouped_gemm"]
        for key in dict.fromkeys(path.rpartition(".")[0] for path in stacked):
            pattern = re.compile(before + re.escape(key).replace(r"\*", "[^.]+"))
            cut = [path.removeprefix(f"{key}.") for path in stacked if path.rpartition(".")[0] == key]
            for name in modules:
                if name not in done and pattern.fullmatch(name):
                    done.add(name)
                    inner, layer, around = _without_adapters(name, modules[name])
                    params = tuple(each for each in cut if layer._parameters.get(each) is not None)
                    said = f"the model's plan, {key}"
                    yield ExpertLayer(inner, layer, _count(layer, params), params, said, _beside(modules, name), around)


def _beside(modules: Mapping[str, nn.Module], name: str) -> tuple[str, ...]:
    """What the block of the experts ``name`` has beside them, and has parameters."""
    block, _, own = name.rpartition(".")
    children = modules[block].named_children() if block in modules else ()
    held = (child for child, module in children if child != own and next(module.parameters(), None) is not None)
    return tuple(f"{block}.{child}" if block else child for child in held)


def _without_adapters(name: str, module: nn.Module) -> tuple[str, nn.Module, tuple[nn.Module, ...]]:
    """The module itself, which adapters have put under ``base_layer``, and what is around it."""
    around = []
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        around.append(module)
        name, module = f"{name}.base_layer", module.base_layer  # type: ignore[assignment]
    return name, module, tuple(around)


def _count(module: nn.Module, params: Sequence[str]) -> int:
    shapes = [_whole_shape(module, name) for name in params]
    return shapes[0][0] if shapes and shapes[0] else 0


def _whole_shape(module: nn.Module, name: str) -> Sequence[int]:
    param = module._parameters[name]
    assert param is not None
    cut = cut_of(param)
    return logical_shape(param) if cut is None else cut.whole


def _by_patterns(model: nn.Module, section: ExpertParallelSection, faults: list[Fault]) -> Iterator[ExpertLayer]:
    assert section.moe_layer_pattern is not None
    try:
        pattern = re.compile(section.moe_layer_pattern)
    except re.error as error:
        message = f"{section.moe_layer_pattern!r:.80} is not a regular expression: {error}"
        faults.append(Fault(f"{POINTER}/moe_layer_pattern", message))
        return
    child = section.expert_pattern or "experts"
    modules = dict(model.named_modules())
    blocks = [(name, block) for name, block in modules.items() if name and pattern.fullmatch(name)]
    blocks = [(name, block) for name, block in blocks if isinstance(getattr(block, child, None), nn.Module)]
    for name, block in blocks:
        inner, module, around = _without_adapters(f"{name}.{child}", getattr(block, child))
        if isinstance(module, nn.ModuleList):
            faults.append(
                Fault(
                    f"{POINTER}/expert_pattern",
                    f"{inner} is a list of {len(module)} modules, each of which the block calls by itself, and only "
                    "experts in one module with stacked parameters are divided",
                    "stack their weights as [experts, outputs, inputs], in a module that is called with (hidden "
                    "states, indices, weights), as transformers does",
                )
            )
            return
        given = [each for each in (section.expert_w1, section.expert_w2, section.expert_w3) if each]
        lacking = [each for each in given if module._parameters.get(each) is None]
        if lacking:
            has = ", ".join(key for key, param in module._parameters.items() if param is not None) or "none"
            message = f"{inner} has no parameter {lacking[0]!r}; it has {has}"
            faults.append(Fault(f"{POINTER}/expert_w{given.index(lacking[0]) + 1}", message))
            return
        count = _told_count(model, section, faults) or _count(module, given or _stacked(module))
        # Biases and scales are cut as well, whatever they are called: all that has a row an expert.
        params = tuple(key for key in _stacked(module, 1) if _whole_shape(module, key)[0] == count)
        said = f"moe_layer_pattern {section.moe_layer_pattern!r:.80}"
        yield ExpertLayer(inner, module, count, params, said, _beside(modules, f"{name}.{child}"), around)


def _stacked(module: nn.Module, least: int = 3) -> list[str]:
    named = ((key, param) for key, param in module._parameters.items() if param is not None)
    return [key for key, param in named if len(_whole_shape(module, key)) >= least]


def _told_count(model: nn.Module, section: ExpertParallelSection, faults: list[Fault]) -> int | None:
    if section.num_experts_attr is None:
        return None
    found = getattr(_text_config(model), section.num_experts_attr, None)
    if not isinstance(found, int):
        message = f"the model's configuration has no number {section.num_experts_attr!r}"
        faults.append(Fault(f"{POINTER}/num_experts_attr", message, "name the field that says how many experts it has"))
        return None
    return found


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


# -- what is wrong -------------------------------------------------------------------------------------------------


def _no_experts(model: nn.Module, section: ExpertParallelSection) -> Fault:
    if section.moe_layer_pattern is not None:
        message = (
            f"no module of {type(model).__name__} has a name that {section.moe_layer_pattern!r:.80} matches as a whole "
            f"and a child {section.expert_pattern or 'experts'!r}"
        )
        return Fault(f"{POINTER}/moe_layer_pattern", message, f"its modules are {_names(model)}")
    lists = next((n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.endswith("experts")), None)
    message = f"{type(model).__name__} has no base_model_ep_plan with experts that are there"
    if lists is not None:
        message += f"; {lists} is a list of modules, which is not divided"
    return Fault(
        POINTER,
        message,
        'set "enabled": false, or name its layers: "moe_layer_pattern", a regular expression of the names of blocks, '
        'and "expert_pattern", the name of their experts, a module with stacked parameters',
    )


def _names(model: nn.Module) -> str:
    names = dict.fromkeys(any_number(name) for name, _ in model.named_modules() if name)
    shown = list(names)[:12]
    return ", ".join(shown) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def any_number(name: str) -> str:
    """The name of a module with ``*`` for its numbers: the same for those that differ in them."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


_PRESETS = {  # of DeepSpeed, and the kinds of models that each is for
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe", "qwen2_moe"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe"),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "minimax_m3": ("minimax_m3_vl_text", "minimax_m3_vl"),
}


def _other_preset(model: nn.Module, preset: str) -> Iterator[Fault]:
    """A preset is a name for what the model's own plan says: it has to be for such a model."""
    kinds = {str(getattr(getattr(module, "config", None), "model_type", "")) for module in model.modules()} - {""}
    if kinds and kinds.isdisjoint(_PRESETS[preset]):
        message = (
            f"the preset {preset} is for {' and '.join(_PRESETS[preset])}, and the model is {', '.join(sorted(kinds))}"
        )
        yield Fault(f"{POINTER}/preset_model", message, "remove it: the model's own plan says which its experts are")


def _unfit(layer: ExpertLayer) -> Iterator[Fault]:
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
        yield Fault(
            POINTER, f"{name}, a {type(module).__name__}, has no parameter whose first dimension counts experts"
        )
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
        if is_packed(param) or not param.is_floating_point():
            yield Fault(
                POINTER,
                f"{name}.{key} is quantized ({type(param).__name__}), and quantized experts are not divided",
                "load it without quantization: divided experts take a part of the memory already",
            )
        elif _whole_shape(module, key)[0] != layer.count:
            message = f"{name}.{key} has {_whole_shape(module, key)[0]} experts, and {layer.params[0]} {layer.count}"
            yield Fault(POINTER, message)
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


def _is_known(adapter: nn.Module, layer: ExpertLayer) -> bool:
    """Whether it is LoRA of one of the layer's weights, ``[experts, inputs, outputs]`` or the other way round."""
    key: Any = getattr(adapter, "parameter_name", None)
    return is_adapter(adapter) and key in layer.params and len(_whole_shape(layer.module, key)) == 3


def _whose(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', 'forward')}"


def _odd(layer: ExpertLayer, size: int) -> Iterator[Fault]:
    if layer.count % size:
        fits = [str(n) for n in range(1, layer.count + 1) if layer.count % n == 0]
        message = f"{layer.name} has {layer.count} experts, which {size} processes do not divide"
        yield Fault(f"{POINTER}/autoep_size", message, f"use one of {', '.join(fits)}")
    buffers = layer.module._buffers.items() if size > 1 else ()
    for key, buffer in buffers:
        if buffer is not None and buffer.dim() and len(buffer) == layer.count:
            message = f"{layer.name}.{key} is a buffer with a row for each expert, and only parameters are divided"
            yield Fault(POINTER, message, "make it a parameter (requires_grad=False), or keep it in the router")


def _odd_keys(layer: ExpertLayer, model: nn.Module, section: ExpertParallelSection) -> Iterator[Fault]:
    """Keys about the router that say something else than the model, whose own router chooses: they would be ignored."""
    config = _text_config(model)
    value: Any
    names: tuple[str, ...]
    for key, value, names in (
        ("top_k", section.top_k, ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "moe_top_k")),
        ("route_norm", section.route_norm, ("norm_topk_prob",)),
        ("num_expert_groups", section.num_expert_groups, ("n_group",)),
        ("num_limited_groups", section.num_limited_groups, ("topk_group",)),
        ("routed_scaling_factor", section.routed_scaling_factor, ("routed_scaling_factor",)),
    ):
        names = ((section.top_k_attr,) if key == "top_k" and section.top_k_attr else ()) + names
        own = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        if value is None or value == "auto" or own == value:
            continue
        if own is None:
            warn_once(
                f"{POINTER}/{key} is {value}, which changes nothing: the model's own router chooses, and its "
                f"configuration has no {names[0]} to compare"
            )
            continue
        message = f"{key} is {value}, and the model's own router, which chooses here too, has {own}"
        yield Fault(f"{POINTER}/{key}", message, f"change the model's configuration, or set {key} to {own}")
