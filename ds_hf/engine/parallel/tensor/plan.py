"""The division of a model: each rule as cuts of parameters and a base for the module's class, checked before anything
is cut."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ds_hf.config.types.parallel import TensorParallelSection, TPPartitionSection
from ds_hf.engine.parallel.tensor.heads import divide_heads, layer_of
from ds_hf.engine.parallel.tensor.partial import unplanned
from ds_hf.engine.parallel.tensor.rules import POINTER, Rule, Rules, find_rules, sizes_of_shape, suggestion
from ds_hf.engine.parallel.tensor.styles import FUSED, STYLES, Style, is_transposed
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import Cut, cut_of
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.planning import find_blocks
from ds_hf.engine.zero.replicas import is_tied_over_stages
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["Slicing", "plan_division"]

VOCAB_PARALLEL = "vocab_parallel_lm_head"


@dataclass
class Slicing:
    """What becomes of one module.

    Attributes:
        name, module: where it is.
        style: its own, or that of its parameters where only they have one.
        parts: by name of its own parameter: the dimension that is cut, and the sizes of what lies along it, each of
            which is divided; all positions of the same size repeat.
        sums: names of its own parameters whose gradient is summed over the tensor axis.
        localises: its parent's attributes that count heads and widths become those that are here.
        neighbours: so many processes compute a head of its outputs together, and all of them need it ...
        repeats: ... for so many queries of each, in its attention; 0 where heads are divided.
    """

    name: str
    module: nn.Module
    style: Style
    parts: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    localises: bool = False
    neighbours: int = 1
    repeats: int = 0

    def cut(self, param: str, shape: Sequence[int], rank: int, size: int) -> Cut:
        """The part of process ``rank`` of ``size`` of the parameter whose whole shape is ``shape``."""
        dim, sizes = self.parts[param]
        ranges, start = [], 0
        for length in sizes:
            part = length // size
            ranges.append((start + rank * part, part))
            start += length
        return Cut(dim, tuple(ranges), shape)  # type: ignore[arg-type]


def plan_division(model: nn.Module, section: TensorParallelSection, size: int) -> list[Slicing]:
    """How ``model`` is divided over ``size`` processes. Changes nothing, and is the same on all processes.

    Args:
        section: ``tensor_parallel`` of the configuration.

    Raises:
        ConfigError: with all faults: no rules, an unknown style, sizes that do not divide, quantized layers.
    """
    faults: list[Fault] = []
    rules = find_rules(model, section, faults)
    if not rules and not faults and section.partition_config is None and section.preset_model is None:
        faults.append(
            Fault(
                POINTER,
                f"{type(model).__name__} has no tp_plan, and nothing else says how its layers are divided over {size} "
                "processes",
                f"give rules; to start from, with every layer to be looked at:\n           {suggestion(model)}",
            )
        )
    divisions = [] if faults else [*_divisions(model, rules, size, faults)]
    if section.partition_config is not None or section.preset_model is not None:
        faults += _against_plan(model, rules, divisions, size)
    if not faults:
        by_vocabulary = [*_by_vocabulary(model, section, size, faults)] if section.vocab_parallel_lm_head else []
        divisions = [each for each in divisions if all(each.module is not other.module for other in by_vocabulary)]
        divisions = by_vocabulary + _without_fused_heads(model, _without_tied(model, divisions))
        divisions += [Slicing(name, child, Style(), sums=own) for name, child, own in unplanned(model, divisions)]
        faults += divide_heads(model, divisions, size)
    if faults:
        raise ConfigError(faults, "tensor parallelism")
    if section.partition_config is None:
        _tell_of_whole_blocks(model, divisions)
    return divisions


def _against_plan(model: nn.Module, rules: Rules, divisions: Sequence[Slicing], size: int) -> Iterator[Fault]:
    """Layers whose outputs a rule cuts otherwise than the model's own plan, which knows what its forward reads
    together: each head's query, key and value, or all queries and then all keys. Once for each rule."""
    plan, told = find_rules(model, TensorParallelSection(), []), set[str]()
    plan.modules, plan.params = {name: plan.modules[name] for name in plan.modules if name in rules.modules}, {}
    planned = {each.name: each for each in _divisions(model, plan, size, [])}
    for division in divisions:
        other = planned.get(division.name)
        if other is None or any(each.style.cuts != "out" or each.style.gathers for each in (division, other)):
            continue
        (_, ours), (_, theirs) = (each.parts.get("weight", (0, ())) for each in (division, other))
        rule = rules.modules.get(layer_of(division.name)) or rules.modules.get(division.name)
        entry = rule.said if rule is not None else ""  # rules of a preset have none
        said = f"{POINTER}/partition_config/{entry}" if entry else f"{POINTER}/preset_model"
        if ours and theirs and ours != theirs and said not in told:
            told.add(said)
            fix = 'leave "shape" out' if len(theirs) == 1 else f'give "shape": [{list(theirs)[:8]}, -1]'
            yield Fault(
                said,
                f"the outputs of {division.name} are cut in parts of {_told(ours)}, and the plan of "
                f"{type(model).__name__} cuts parts of {_told(theirs)}: its forward would take them for others",
                fix if entry else "remove it: the model's own plan divides it",
            )


def _told(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")


def _tell_of_whole_blocks(model: nn.Module, divisions: Sequence[Slicing]) -> None:
    """Some plans of transformers (Qwen3-VL's) are of the output layer alone."""
    inside = {id(module) for _, block in find_blocks(model) for module in block.modules()}
    cut = [division for division in divisions if division.parts]
    has_holes = any(_is_elsewhere(module) for module in model.modules())
    if inside and not has_holes and not any(id(division.module) in inside for division in cut):
        warn_once(
            f"tensor parallelism divides {', '.join(each.name for each in cut[:3]) or 'nothing'} of "
            f"{type(model).__name__}, and no layer of its blocks: its tp_plan says no more, so each process has, and "
            "computes, the others whole. Give rules for them (tensor_parallel.partition_config), or remove autotp_size"
        )


# -- from rules to divisions ---------------------------------------------------------------------------------------


def _divisions(model: nn.Module, rules: Rules, size: int, faults: list[Fault]) -> Iterator[Slicing]:
    modules = dict(model.named_modules())
    named = {
        name: [*_layers(name, modules[name], rule, faults)]
        for name, rule in rules.modules.items()
        if not _is_elsewhere(modules[name])
    }
    for found in named.values():
        for name, module, rule in found:
            style = STYLES[rule.style]
            if style == Style():
                continue
            if rule.shape is not None:
                style = FUSED[style.cuts]
            division = Slicing(name, module, style, localises=rules.local_attributes)
            own = {key: param for key, param in module._parameters.items() if param is not None}
            if style.sums_gradient:
                division.sums = list(own)
            if style.cuts:
                uneven = [*_cut_layer(division, own, rule, size, faults)]
                if uneven and _may_stay_whole(rule):
                    _tell_of_whole(uneven[0].message, uneven[0].fix)
                    continue
                faults += [*_unfit(name, module), *uneven]
            yield division
    by_owner: dict[str, dict[str, Rule]] = defaultdict(dict)
    for path, rule in rules.params.items():
        owner, _, key = path.rpartition(".")
        by_owner[owner][key] = rule
    for owner, entries in by_owner.items():
        yield from _of_parameters(owner, modules[owner], entries, size, faults)


def _layers(name: str, module: nn.Module, rule: Rule, faults: list[Fault]) -> Iterator[tuple[str, nn.Module, Rule]]:
    """The modules that a rule for ``name`` is about: PEFT puts its own around the layer and beside it."""
    if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
        parts = {"original_module": module.original_module, **_children(module, "modules_to_save")}
        yield from ((f"{name}.{path}", part, rule) for path, part in parts.items() if isinstance(part, nn.Module))
        return
    base = getattr(module, "base_layer", None)
    style = STYLES[rule.style]
    if not isinstance(base, nn.Module):
        if style.cuts and _may_stay_whole(rule) and hasattr(module, "token_adapter"):
            rows = f"some rows of {name} are trained by themselves (PEFT's trainable_token_indices)"
            _tell_of_whole(rows, "train none of them so")
        else:
            yield name, module, rule
        return
    if hasattr(module, "parameter_name") and (style.cuts or style.module is not None):
        faults.append(
            Fault(
                POINTER,
                f"{name} has an adapter of a parameter (PEFT's target_parameters), which is added to the whole "
                "of it, and each process would have a part",
                "adapt linear layers (target_modules), or experts with expert_parallel and without autotp_size",
            )
        )
        return
    cuts = style.cuts
    beside = [
        child
        for child, part in module.named_children()
        if child != "base_layer" and any(True for _ in part.parameters())
    ]
    plain = {"lora_A", "lora_B"}
    odd = [child for child in beside if child not in plain] + [
        key for key, on in (getattr(module, "use_dora", None) or {}).items() if on
    ]
    if cuts and (odd or cuts in ("rows", "columns")):
        what = f"{name} has an adapter ({type(module).__name__}: {', '.join(odd) or 'of an embedding'})"
        if _may_stay_whole(rule):
            _tell_of_whole(f"{what} that looks at all of it", "do without this adapter")
            return
        faults.append(
            Fault(
                POINTER,
                f"{what} that looks at the whole layer, of which each process would have a part",
                "use LoRA without DoRA on linear layers, or leave this layer whole by a partition_config rule "
                'of "partition_type": "skip"',
            )
        )
    yield f"{name}.base_layer", base, rule
    for child in ("lora_B",) if cuts == "out" else ("lora_A",) if cuts == "in" else ():
        yield from ((f"{name}.{path}", part, rule) for path, part in _children(module, child).items())


def _children(module: nn.Module, name: str) -> dict[str, nn.Module]:
    return {f"{name}.{key}": part for key, part in getattr(module, name, {}).items()}


def _unfit(name: str, module: nn.Module) -> Iterator[Fault]:
    """Faults of a module whose class cannot compute with a part of its weight."""
    weight = module._parameters.get("weight")
    if weight is None:
        yield Fault(POINTER, f"{name}, a {type(module).__name__}, has no parameter weight to cut", "leave it out")
    elif is_packed(weight) or not weight.is_floating_point():
        yield Fault(
            POINTER,
            f"{name} is quantized ({type(module).__name__}), and quantized weights are not divided over "
            "tensor-parallel processes",
            "load the model without quantization, or train it with ZeRO stage 3 and no tensor parallelism",
        )
    elif "forward" in vars(module):
        yield Fault(
            POINTER,
            f"the forward of {name}, a {type(module).__name__}, was replaced, and would compute with a part of the "
            "weight as if it were the whole",
            "give it its own forward, or leave it whole",
        )


def _cut_layer(
    division: Slicing, own: Mapping[str, Tensor], rule: Rule, size: int, faults: list[Fault]
) -> Iterator[Fault]:
    """Write into ``division`` what is cut. What cannot be said of a layer goes to ``faults``; yields the parameters
    that ``size`` does not divide."""
    style = division.style
    for key, param in own.items():
        shape = logical_shape(param) if cut_of(param) is None else cut_of(param).whole  # type: ignore[union-attr]
        dim = _dimension(style, division.module, key, len(shape))
        if dim is None:
            continue
        sizes = _sizes(division, shape, dim, rule, key, faults)
        yield from _uneven(division.name, key, shape, dim, sizes, size, rule)
        division.parts[key] = (dim, sizes)


def _may_stay_whole(rule: Rule) -> bool:
    """A layer whose inputs and outputs are whole computes the same if it is whole, too: an output layer or an
    embedding."""
    return STYLES[rule.style].stands_alone and rule.said != VOCAB_PARALLEL


def _tell_of_whole(why: str, fix: str) -> None:
    warn_once(
        f"tensor parallelism: {why}, so this layer stays whole on every process, which computes all of it; to divide "
        f"it, {fix}"
    )


def _dimension(style: Style, module: nn.Module, key: str, dims: int) -> int | None:
    """Which dimension of a parameter is cut; ``None`` for none."""
    if style.cuts == "rows":
        return 0
    if style.cuts == "columns":
        return dims - 1
    if dims == 1:
        return 0 if style.cuts == "out" else None
    outputs = dims - 1 if is_transposed(module) else dims - 2
    return outputs if style.cuts == "out" else 2 * dims - 3 - outputs


def _sizes(
    division: Slicing, shape: Sequence[int], dim: int, rule: Rule, key: str, faults: list[Fault]
) -> tuple[int, ...]:
    """What lies along the cut dimension, one after another; each of it is divided."""
    length = shape[dim]
    if rule.shape is None:
        return (length // division.style.packed,) * division.style.packed if _even(length, division) else (length,)
    try:
        return sizes_of_shape(rule, shape, dim)
    except ValueError as error:
        faults.append(
            Fault(
                f"{POINTER}/partition_config/{rule.said}/shape",
                f"{list(rule.shape)} does not fit {division.name}.{key}, {tuple(shape)}: {error}",
                "give the sizes of what is fused, such as [[q, k, v], -1], or their number, such as [2, -1]",
            )
        )
        return (length,)


def _even(length: int, division: Slicing) -> bool:
    return length % division.style.packed == 0


def _uneven(
    name: str, key: str, shape: Sequence[int], dim: int, sizes: Sequence[int], size: int, rule: Rule
) -> Iterator[Fault]:
    odd = next((length for length in sizes if length % size), None)
    if odd is None:
        return
    style = STYLES[rule.style]
    what = {"rows": "the vocabulary of", "columns": "the hidden size of", "in": "the inputs of"}.get(
        style.cuts, "the outputs of"
    )
    fix = f"use a tensor-parallel size that divides {math.gcd(*sizes)}"
    if style.cuts == "rows" or name.rpartition(".")[2] in ("lm_head", "embed_out"):
        fix += f", or model.resize_token_embeddings(..., pad_to_multiple_of={size})"
    whole = f"{odd}" if len(sizes) == 1 else f"{odd} of {shape[dim]}"
    verb = "is" if style.cuts in ("rows", "columns") else "are"
    yield Fault(POINTER, f"{what} {name} ({key} {tuple(shape)}) {verb} {whole}, which {size} does not divide", fix)


def _of_parameters(
    owner: str, module: nn.Module, entries: Mapping[str, Rule], size: int, faults: list[Fault]
) -> Iterator[Slicing]:
    """Rules that name parameters: of stacked experts ``[experts, outputs, inputs]``, of attention sinks."""
    division = Slicing(owner, module, Style())
    for key, rule in entries.items():
        style, param = STYLES[rule.style], module._parameters[key]
        assert param is not None
        shape, where = logical_shape(param), f"{owner}.{key}"
        if not style.takes_parameter:
            message = f'{where} has the style "{rule.style}", which is for modules'
            faults.append(Fault(POINTER, message, "name the module"))
        elif style.sums_gradient:
            division.sums.append(key)
        elif style.cuts:
            if is_packed(param):
                faults.append(Fault(POINTER, f"{where} is quantized and cannot be cut", "load it without quantization"))
                continue
            bias = key.endswith("bias")
            dim = len(shape) - 1 if style.cuts == "in" or bias or len(shape) == 1 else len(shape) - 2
            if bias and style.cuts == "in":
                continue
            packed = 2 if _is_halved(module, key) else style.packed
            packed = packed if shape[dim] % packed == 0 else 1
            sizes = (shape[dim] // packed,) * packed
            faults += _uneven(owner, key, shape, dim, sizes, size, rule)
            division.parts[key] = (dim, sizes)
    if division.parts or division.sums:
        yield division


def _is_halved(module: nn.Module, key: str) -> bool:
    """Whether the first half of a stacked weight is of the gate, which Inkling's plan does not say."""
    forward = inspect.unwrap(type(module).forward)
    try:
        return key == "gate_up_proj" and ".chunk(2" in inspect.getsource(forward)
    except (OSError, TypeError):  # without a source
        return False


def _by_vocabulary(
    model: nn.Module, section: TensorParallelSection, size: int, faults: list[Fault]
) -> Iterator[Slicing]:
    """The output layer, and the embeddings that share its weight: both are cut by their rows, so each process has the
    same part of the tensor for both (``vocab_parallel_lm_head``)."""
    pointer = f"{POINTER}/{VOCAB_PARALLEL}"
    names = {id(module): name for name, module in model.named_modules()}
    heads = [module for module in _output_layers(model, section) if id(module) in names]
    if not heads:
        faults.append(
            Fault(
                pointer,
                f"{type(model).__name__} has no output layer that ds_hf knows: no get_output_embeddings(), and no "
                "linear layer with a name of lm_head_patterns",
                "remove it",
            )
        )
    for head in dict.fromkeys(heads):
        name, weight = names[id(head)], head._parameters.get("weight")
        if not isinstance(head, nn.Linear) or weight is None:
            kind = f"{type(head).__module__}.{type(head).__qualname__}"  # PEFT's is a Linear, too
            message = f"{name or 'the output layer'} is a {kind}, and only an nn.Linear is cut by it"
            faults.append(Fault(pointer, message, "remove it, or the adapter of this layer"))
            continue
        where = next(
            (found for module in model.modules() if _output_of(module) is head and (found := _replaced_by(module))), ""
        )
        if where:
            message = (
                f"the model's forward is now {where}, which may multiply by the weight of {name} without calling it"
            )
            faults.append(Fault(pointer, message, "remove it, or do without the fused loss"))
            continue
        rules = {name: Rule("colwise_gather_output", VOCAB_PARALLEL)}
        for other, module in model.named_modules():
            if module is not head and any(param is weight for param in module._parameters.values()):
                rules[other] = Rule("embedding_rowwise", VOCAB_PARALLEL)
                if not isinstance(module, nn.Embedding):
                    message = f"{name} shares its weight with {other}, a {type(module).__name__}"
                    faults.append(Fault(pointer, message, "remove it: the layers then stay whole"))
        yield from _divisions(model, Rules(VOCAB_PARALLEL, modules=rules), size, faults)


def _output_layers(model: nn.Module, section: TensorParallelSection) -> Iterator[nn.Module]:
    patterns = (section.partition_config or TPPartitionSection()).lm_head_patterns
    for name, module in model.named_modules():
        head = _output_of(module)
        if head is not None:
            yield head
        elif name.rpartition(".")[2] in patterns and isinstance(module, nn.Linear):
            yield module


def _output_of(module: nn.Module) -> nn.Module | None:
    found: Any = getattr(module, "get_output_embeddings", None)
    head = found() if callable(found) else None
    return head if isinstance(head, nn.Module) else None


# -- what stays whole, and checks ----------------------------------------------------------------------------------


def _without_tied(model: nn.Module, divisions: list[Slicing]) -> list[Slicing]:
    """Parameters that several modules share stay whole, and so do those modules, unless all cut them in the same way
    (layers that PEFT's ``layer_replication`` repeats)."""
    holders: dict[int, list[str]] = defaultdict(list)
    ways: dict[int, list[Any]] = defaultdict(list)
    for division in divisions:
        for key, part in division.parts.items():
            ways[id(division.module._parameters[key])].append((key, part, division.style))
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                holders[id(param)].append(f"{name}.{key}" if name else key)
    kept, tied, whole = [], [], set[int]()
    has_holes = any(_is_elsewhere(module) for module in model.modules())
    for division in divisions:
        shared = [
            holders[id(param)] if len(holders[id(param)]) > 1 else [*holders[id(param)], "a layer of another stage"]
            for key in division.parts
            if (param := division.module._parameters[key]) is not None
            and (len(holders[id(param)]) > 1 or (has_holes and is_tied_over_stages(param)))
            and (has_holes or not _same_way(ways[id(param)], len(holders[id(param)])))
        ]
        tied += shared
        if shared:
            whole.add(id(division.module))
        else:
            kept.append(division)
    kept = [division for division in kept if id(division.module) not in whole]  # what sums parts of its outputs
    if tied:
        names = " and ".join(tied[0])
        heads = {id(head) for module in model.modules() if (head := _output_of(module)) is not None}
        of_head = any(id(division.module) in heads for division in divisions if division not in kept)
        choice = '; "vocab_parallel_lm_head": true divides both by the vocabulary' if of_head else ""
        warn_once(
            f"{names} are one tensor: it stays whole on every tensor-parallel process, as do the modules that use "
            f"it{choice}"
        )
    return kept


def _same_way(ways: list[Any], holders: int) -> bool:
    """Whether all ``holders`` of a parameter cut it, and as the first does."""
    return len(ways) == holders and all(way == ways[0] for way in ways)


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether it stands for a layer that another stage of the pipeline has."""
    return bool(getattr(module, "_ds_elsewhere", False))


def _without_fused_heads(model: nn.Module, divisions: list[Slicing]) -> list[Slicing]:
    """Heads stay whole where another library has replaced the model's forward: fused losses (Liger's, TRL's) multiply
    by the head's weight without calling the head, and would take a part of the vocabulary for all of it."""
    fused: dict[int, str] = {}
    for module in model.modules():
        head = _output_of(module)
        if head is not None and (where := _replaced_by(module)):
            fused[id(head)] = where
    kept = [division for division in divisions if not (division.parts and id(division.module) in fused)]
    for division in divisions:
        if division.parts and id(division.module) in fused:
            warn_once(
                f"{division.name} stays whole on every tensor-parallel process: the model's forward is now "
                f"{fused[id(division.module)]}, which may multiply by the weight of the head without calling it"
            )
    return kept


def _replaced_by(module: nn.Module) -> str:
    """Where the forward of ``module`` comes from, if its class was not written with it; ``""`` if it was."""
    own = vars(module).get("forward")
    if own is not None:
        return f"{getattr(own, '__module__', '?')}.{getattr(own, '__name__', 'forward')}"
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    written = str(getattr(vars(owner)["forward"], "__module__", ""))
    return "" if written.partition(".")[0] == owner.__module__.partition(".")[0] else f"that of {written}"
