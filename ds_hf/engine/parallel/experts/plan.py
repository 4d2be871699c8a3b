"""Which modules of a model hold its experts, from the model's own plan or from patterns of the file.

A model of transformers says it in ``config.base_model_ep_plan``: the parameters whose first dimension counts experts
(``grouped_gemm``); the modules that have them are given tokens, their experts and weights. What else a plan has is of
tensor parallelism, or of how a release of transformers dispatches. ``expert_parallel.moe_layer_pattern`` and its
companions say it of other models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ds_hf.config.patterns import may_take_long
from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.parallel.experts.layer import (
    POINTER,
    ExpertLayer,
    counts_of,
    odd,
    odd_keys,
    text_config,
    unclear,
    unfit,
    whole_shape,
)
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["any_number", "find_experts", "plan_experts"]

_BESIDE = ("expert_pattern", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr")


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
    if section.preset_model is not None:
        faults += _other_preset(model, section.preset_model)
    said = set[str]()
    if size == 1:
        found = [layer for layer in found if not any(unfit(layer))]
    unclear_of = unclear if patterns and size > 1 else lambda _: ()
    for layer in found:
        for fault in (*unfit(layer), *odd(layer, size), *odd_keys(layer, model, section), *unclear_of(layer)):
            if fault.message.replace(layer.name, "") not in said:  # each once, for the first of alike layers
                said.add(fault.message.replace(layer.name, ""))
                faults.append(fault)
    if faults:
        raise ConfigError(faults, "expert parallelism")
    return found


def find_experts(model: nn.Module, section: ExpertParallelSection) -> list[ExpertLayer]:
    """Modules with stacked experts, whatever can be done with them: by patterns or plans, as ``plan_experts`` has them,
    and those whose own name says so."""
    found = [*_by_patterns(model, section, [])] if section.moe_layer_pattern else [*_by_plans(model)]
    known = {id(layer.module) for layer in found}
    for name, module in model.named_modules():
        path = name.replace(".base_layer", "")
        params = _stacked(module) if "expert" in path.rpartition(".")[2] and id(module) not in known else ()
        count = _count(module, params)
        if params and count > 1 and all(whole_shape(module, key)[0] == count for key in params):
            outer, _, _ = name.partition(".base_layer")
            inner, _, around = _without_adapters(outer, model.get_submodule(outer))
            found.append(ExpertLayer(inner, module, count, tuple(params), "its name", (), around))
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
    shapes = [whole_shape(module, name) for name in params]
    return shapes[0][0] if shapes and shapes[0] else 0


def _by_patterns(model: nn.Module, section: ExpertParallelSection, faults: list[Fault]) -> Iterator[ExpertLayer]:
    assert section.moe_layer_pattern is not None
    try:
        pattern = re.compile(section.moe_layer_pattern)
    except (re.error, RecursionError, OverflowError) as error:
        message = f"{section.moe_layer_pattern!r:.80} is not a regular expression: {error}"
        faults.append(Fault(f"{POINTER}/moe_layer_pattern", message))
        return
    modules = dict(model.named_modules())
    if may_take_long(section.moe_layer_pattern, modules):
        message = (
            f"matching {section.moe_layer_pattern!r:.80} with a name may take for ever: it repeats a group, or too"
        )
        fix = r"write a simpler one, such as model\.layers\.\d+\.mlp"
        faults.append(Fault(f"{POINTER}/moe_layer_pattern", f"{message} much else", fix))
        return
    child = section.expert_pattern or "experts"
    blocks = [(name, block) for name, block in modules.items() if name and pattern.fullmatch(name)]
    blocks = [(name, block) for name, block in blocks if isinstance(getattr(block, child, None), nn.Module)]
    done = set[int]()
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
        if id(module) in done:  # two blocks call the same experts
            continue
        done.add(id(module))
        given = _given(section, inner, module, faults)
        if given is None:
            return
        told = _told_count(model, section, faults)
        count = told or _count(module, given or _stacked(module))
        for key in given:
            place = f"{POINTER}/{_key_of(section, key)}"
            shape = whole_shape(module, key)
            if shape[0] != count:
                message = f"{inner}.{key} has {shape[0]} rows, and there are {count} experts"
                faults.append(Fault(place, message, "name weights that are stacked, [experts, outputs, inputs]"))
            elif len(shape) < 3 and told is None and count not in counts_of(module):
                message = f"{inner}.{key} is {list(shape)}: whether an expert has one row or several cannot be told"
                faults.append(Fault(place, message, "say how many there are: num_experts_attr"))
        # Biases and scales are cut as well, whatever they are called: all that has a row an expert.
        params = tuple(key for key in _stacked(module, 1) if whole_shape(module, key)[0] == count)
        said = f"moe_layer_pattern {section.moe_layer_pattern!r:.80}"
        yield ExpertLayer(inner, module, count, params, said, _beside(modules, f"{name}.{child}"), around)


def _given(section: ExpertParallelSection, name: str, module: nn.Module, faults: list[Fault]) -> list[str] | None:
    """Weights that the file names; ``None`` and a fault where the module lacks one."""
    given = [each for each in (section.expert_w1, section.expert_w2, section.expert_w3) if each]
    lacking = [each for each in given if module._parameters.get(each) is None]
    if not lacking:
        return given
    has = ", ".join(key for key, param in module._parameters.items() if param is not None) or "none"
    message = f"{name} has no parameter {lacking[0]!r}; it has {has}"
    faults.append(Fault(f"{POINTER}/{_key_of(section, lacking[0])}", message))
    return None


def _key_of(section: ExpertParallelSection, weight: str) -> str:
    return next(key for key in ("expert_w1", "expert_w2", "expert_w3") if getattr(section, key) == weight)


def _stacked(module: nn.Module, least: int = 3) -> list[str]:
    named = ((key, param) for key, param in module._parameters.items() if param is not None)
    return [key for key, param in named if len(whole_shape(module, key)) >= least]


def _told_count(model: nn.Module, section: ExpertParallelSection, faults: list[Fault]) -> int | None:
    if section.num_experts_attr is None:
        return None
    found = getattr(text_config(model), section.num_experts_attr, None)
    if type(found) is not int or found < 1:
        message = f"the model's configuration has no number {section.num_experts_attr!r}"
        faults.append(Fault(f"{POINTER}/num_experts_attr", message, "name the field that says how many experts it has"))
        return None
    return found


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
