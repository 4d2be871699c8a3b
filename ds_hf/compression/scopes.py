"""Which layers of a model a file means, and what each of them is prepared for.

Patterns are searched for in the names of modules, as DeepSpeed does; ``"*"`` means all. What a pattern finds is what
can be compressed: linear layers, transformers' ``Conv1D``, embeddings, convolutions, by the method. Adapters (LoRA) and
packed weights are left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from ds_hf.compression.compressed import Compressed
from ds_hf.compression.layers import adopt, class_for, is_conv1d, is_linear
from ds_hf.config.schema import escape
from ds_hf.config.types.compression import (
    ActivationQuantizationSection,
    CompressionTrainingSection,
    HeadPruningSection,
    QuantizedWeightsSection,
    Section,
    SparsePruningSection,
    pattern_of,
    ratio_of,
)
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["PRUNINGS", "Group", "find_groups", "prepare_layers"]

BASE = "/compression_training"
# What a method of pruning is called by a layer.
PRUNINGS = {
    "sparse_pruning": "sparse",
    "row_pruning": "row",
    "head_pruning": "head",
    "channel_pruning": "channel",
}
_ADAPTER = re.compile(r"(^|\.)(lora|vera|ia3|oft|adalora)_", re.IGNORECASE)
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "d_head", "key_value_proj_dim")


@dataclass
class Group:
    """One group of a method.

    Attributes:
        method, name: as the file has them.
        section: of the method.
        params: of the group.
        layers: names of its layers, in the model's order.
        related: of a layer, the names of what shrinks with it.
    """

    method: str
    name: str
    section: Section
    params: Mapping[str, Any]
    layers: list[str] = field(default_factory=list)
    related: dict[str, list[str]] = field(default_factory=dict)

    @property
    def pointer(self) -> str:
        return f"{BASE}/{self.method}/different_groups/{escape(self.name)}"

    @property
    def ratio(self) -> float:
        """The share that is kept, of a method that prunes."""
        return ratio_of(self.section, {"params": self.params})


def _takes(method: str) -> tuple[str, Callable[[nn.Module], bool]]:
    """What a method acts on, in words and as a test."""
    if method in ("row_pruning", "head_pruning"):
        return "linear layers", is_linear
    if method == "channel_pruning":
        return "2-dimensional convolutions", lambda m: isinstance(m, nn.Conv2d)
    if method == "activation_quantization":
        return "linear layers and 2-dimensional convolutions", lambda m: is_linear(m) or isinstance(m, nn.Conv2d)
    return (
        "linear layers, 2-dimensional convolutions and embeddings",
        lambda m: is_linear(m) or isinstance(m, nn.Conv2d | nn.Embedding),
    )


def _searched(pattern: str, name: str) -> bool:
    return pattern == "*" or re.search(pattern, name) is not None


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_modules())
        self.faults: list[Fault] = []
        self.may = {
            name: module
            for name, module in self.named.items()
            if class_for(module) is not None and not _ADAPTER.search(name) and not self._is_packed(module)
        }

        counts = Counter(id(param) for module in self.named.values() for param in module.parameters(recurse=False))
        self.shared = {key for key, count in counts.items() if count > 1}

    def is_shared(self, name: str) -> bool:
        """Whether another module has the weight of ``name`` as well."""
        return id(getattr(self.named[name], "weight", None)) in self.shared

    def _is_packed(self, module: nn.Module) -> bool:
        return any(is_packed(param) for param in module.parameters(recurse=False))

    def search(self, pattern: str, pointer: str, takes: tuple[str, Callable[[nn.Module], bool]]) -> list[str]:
        """Names that ``pattern`` finds, with a fault where there are none."""
        words, fits = takes
        found = [name for name, module in self.may.items() if fits(module) and _searched(pattern, name)]
        if not found:
            others = [name for name in self.named if name and _searched(pattern, name)]
            kinds = sorted({type(self.named[name]).__name__ for name in others})
            if others:
                message = f"{pattern!r:.80} finds {', '.join(kinds)[:120]} alone, and this method compresses {words}"
            else:
                some = [name for name, module in self.may.items() if fits(module)]
                message = f"{pattern!r:.80} is in no module's name; there are {', '.join(some[:3]) or 'none'}, ..."
            self.faults.append(Fault(pointer, message, "give a part of the names of the layers that you mean"))
        return found

    def fault(self, pointer: str, message: str, fix: str) -> None:
        self.faults.append(Fault(pointer, message, fix))


def find_groups(model: nn.Module, section: CompressionTrainingSection) -> list[Group]:
    """The groups of all methods that are enabled, with their layers in ``model``.

    Raises:
        ConfigError: with all that is wrong: patterns that find nothing, layers in two groups, shapes that do not
            divide, processes that divide a layer.
    """
    finder = _Finder(model)
    groups = []
    for method, content in section.methods():
        seen: dict[str, str] = {}
        if isinstance(content, SparsePruningSection):
            for index, pattern in enumerate(content.shared_parameters.excluded_modules):
                if not any(_searched(pattern, name) for name in finder.named if name):
                    pointer = f"{BASE}/{method}/shared_parameters/excluded_modules/{index}"
                    message = f"{pattern!r:.80} is in no module's name, and leaves nothing out"
                    finder.fault(
                        pointer, message, "give a part of the names of the modules that you mean, or remove it"
                    )
        for name, written in content.different_groups.items():
            group = Group(method, name, content, written.get("params", {}))
            _fill(finder, group, written, seen)
            groups.append(group)
    for group in groups:
        for name in group.layers:
            finder.faults.extend(_shape_faults(finder, group, name))
    finder.faults.extend(_contradictions(groups))
    if finder.faults:
        raise ConfigError(finder.faults, "compression_training")
    return groups


def _fill(finder: _Finder, group: Group, written: Mapping[str, Any], seen: dict[str, str]) -> None:
    takes, related = _takes(group.method), written.get("related_modules")
    excluded: tuple[str, ...] = ()
    if isinstance(group.section, SparsePruningSection):
        excluded = group.section.shared_parameters.excluded_modules
    for index, pattern in enumerate(written.get("modules", ["*"])):
        found = finder.search(pattern, f"{group.pointer}/modules/{index}", takes)
        found = [name for name in found if not any(_searched(each, name) for each in excluded)]
        for name in found:
            if seen.setdefault(name, group.name) != group.name:
                message = f"{name} is in the group {seen[name]!r} of {group.method} as well"
                finder.fault(f"{group.pointer}/modules/{index}", message, "let each layer be found by one group")
        group.layers += [name for name in found if name not in group.layers]
        patterns = related[index] if related else ()
        for place, other in enumerate(patterns):
            if not _is_of_no_norm(finder, group, other, patterns):
                _relate(finder, group, found, other, f"{group.pointer}/related_modules/{index}/{place}")


def _is_of_no_norm(finder: _Finder, group: Group, pattern: str, patterns: Sequence[str]) -> bool:
    """Whether ``pattern`` names batch norms of a model that has none, as the file of DeepSpeed's example; told."""
    finds = {each for name in finder.named for each in patterns if _searched(each, name)}
    normed = any(isinstance(module, nn.BatchNorm2d) for module in finder.named.values())
    if group.method != "channel_pruning" or normed or pattern in finds or not finds:
        return False
    warn_once(f"{group.pointer}: {pattern!r:.80} is in no module's name, and the model has no batch norms: left out")
    return True


def _relate(finder: _Finder, group: Group, found: list[str], pattern: str, pointer: str) -> None:
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
    takes = (
        ("convolutions, batch norms and linear layers", lambda m: isinstance(m, kinds) or is_conv1d(m))
        if group.method == "channel_pruning"
        else _takes("row_pruning")
    )
    others = finder.search(pattern, pointer, takes)
    if others and len(others) != len(found):
        message = f"it finds {len(others)} modules for {len(found)} layers ({', '.join(others[:2])}, ...)"
        finder.fault(pointer, message, "give a pattern that finds one for each layer")
        return
    for name, other in zip(found, others, strict=False):
        group.related.setdefault(name, []).append(other)


# -- shapes ------------------------------------------------------------------------------------------------------------


def outputs_of(module: nn.Module) -> int:
    """Rows of a layer: its outputs, channels, or the features of a norm."""
    shape = logical_shape(cast(nn.Parameter, module.weight))
    return shape[1] if is_conv1d(module) else shape[0]


def inputs_of(module: nn.Module) -> int:
    """Of a linear layer or a convolution: inputs, or channels of them."""
    shape = logical_shape(cast(nn.Parameter, module.weight))
    return shape[0] if is_conv1d(module) else shape[1] if len(shape) > 1 else shape[0]


def _shape_faults(finder: _Finder, group: Group, name: str) -> Iterator[Fault]:
    module = finder.named[name]
    weight = cast(nn.Parameter, module.weight)
    shape = logical_shape(weight)
    if is_cut(weight):
        message = f"{name} is divided among processes, and masks and scales are of whole weights"
        yield Fault(group.pointer, message, "remove the tensor parallelism: ZeRO's stages 1 to 3 divide the memory")
    if isinstance(group.section, QuantizedWeightsSection):
        groups = group.section.shared_parameters.quantize_groups
        if shape.numel() % groups:
            message = f"{name} has {shape.numel()} weights, which {groups} groups do not divide"
            yield Fault(
                f"{BASE}/weight_quantization/shared_parameters/quantize_groups", message, "give a divisor of it"
            )
    if isinstance(group.section, SparsePruningSection) and (pattern := pattern_of(group.section)) is not None:
        inner = shape[0] if is_conv1d(module) else shape[1:].numel()
        if inner % pattern[1]:
            pointer = f"{BASE}/sparse_pruning/shared_parameters/block_pattern"
            yield Fault(pointer, f"{name} has {inner} inputs, which {pattern[1]} does not divide", "exclude the module")
    for other in (name, *group.related[name]) if group.related.get(name) else ():
        if finder.is_shared(other):
            message = f"{other} shares its weight with another module, which would have to shrink with it"
            yield Fault(
                f"{group.pointer}/related_modules", message, "leave related_modules out: rows become zeros then"
            )
    if isinstance(group.section, HeadPruningSection):
        yield from _head_faults(finder, group, name)
    elif group.method in ("row_pruning", "channel_pruning"):
        rows = outputs_of(module)
        for other in group.related.get(name, ()):
            related = finder.named[other]
            flattened = group.method == "channel_pruning" and isinstance(related, nn.Linear)
            if flattened and inputs_of(related) % rows == 0:
                continue
            several = group.method == "row_pruning" and len(group.related[name]) > 1
            if several and inputs_of(related) == outputs_of(related) == rows:
                message = f"{other} is {rows} x {rows}: whether it follows {name}, or stands beside it, cannot be told"
                fix = "leave related_modules out: rows become zeros then"
                yield Fault(f"{group.pointer}/related_modules", message, fix)
            if rows not in (inputs_of(related), outputs_of(related)):
                message = f"{name} has {rows} outputs, and {other} neither reads nor makes as many"
                yield Fault(f"{group.pointer}/related_modules", message, "name the layer that reads its outputs")


def _head_faults(finder: _Finder, group: Group, name: str) -> Iterator[Fault]:
    assert isinstance(group.section, HeadPruningSection)
    heads = group.section.shared_parameters.num_heads or 1
    pointer, width = f"{BASE}/head_pruning/shared_parameters/num_heads", inputs_of(finder.named[name])
    if width % heads:
        yield Fault(
            pointer, f"{name} reads {width} values, which {heads} heads do not divide", "give the model's heads"
        )
        return
    parent = finder.named[name.rpartition(".")[0]]
    around = [parent, *(child for child in parent.children())]
    up = finder.named.get(name.rpartition(".")[0].rpartition(".")[0])
    around += [up, *up.children()] if up is not None else []
    size = next((v for m in around for key in _HEAD_DIMS if isinstance(v := getattr(m, key, None), int)), None)
    for other in group.related.get(name, ()):
        rows = outputs_of(finder.named[other])
        rows = width if rows == 3 * width else rows  # queries, keys and values in one layer
        if rows % heads or (size and (rows // heads) % size):
            fits = rows // size if size else "the number of them"
            message = f"{other} has {rows} outputs, which are no {heads} heads" + (f" of {size}" if size else "")
            yield Fault(pointer, message, f"give {fits}: where queries share keys and values, their number")


def _contradictions(groups: list[Group]) -> Iterator[Fault]:
    rows = {name for group in groups if group.method == "row_pruning" for name in group.layers}
    for group in groups:
        if group.method != "head_pruning":
            continue
        for name in group.layers:
            both = [other for other in (name, *group.related.get(name, ())) if other in rows]
            if both:
                message = f"{both[0]} would lose rows with its heads, and by row_pruning"
                yield Fault(group.pointer, message, "take it out of one of the two")


# -- layers ------------------------------------------------------------------------------------------------------------


def prepare_layers(model: nn.Module, groups: list[Group]) -> None:
    """Give the layers of ``groups`` the classes that compress, in place, and prepare each method."""
    for group in groups:
        for name in group.layers:
            layer = adopt(model.get_submodule(name), name)
            _prepare(layer, group)
            parent: Any = model.get_submodule(name.rpartition(".")[0])
            if isinstance(parent, nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0  # its kernel for evaluation reads weights by itself
            for other in group.related.get(name, ()):
                if isinstance(related := model.get_submodule(other), nn.BatchNorm2d):
                    vars(adopt(related, other))["masked_by"] = (layer,)


def _prepare(layer: Compressed, group: Group) -> None:
    section, params = group.section, group.params
    if isinstance(section, QuantizedWeightsSection):
        shared = section.shared_parameters
        layer.enable_weight_quantization(
            params.get("start_bits") or params["target_bits"],
            params["target_bits"],
            params.get("quantization_period", 1),
            shared.quantize_weight_in_forward,
            shared.quantization_type,
            shared.quantize_groups,
            stochastic=shared.rounding == "stochastic",
        )
    elif isinstance(section, ActivationQuantizationSection):
        inputs = section.shared_parameters
        layer.enable_activation_quantization(
            params["bits"], inputs.quantization_type, inputs.range_calibration, by_steps=True
        )
    elif isinstance(section, SparsePruningSection):
        layer.enable_sparse_pruning(group.ratio, section.shared_parameters.method, pattern=pattern_of(section))
    elif isinstance(section, HeadPruningSection):
        heads = section.shared_parameters.num_heads
        assert heads is not None
        layer.enable_head_pruning(group.ratio, section.shared_parameters.method, heads)
    elif group.method == "row_pruning":
        layer.enable_row_pruning(group.ratio, section.shared_parameters.method)
    else:
        layer.enable_channel_pruning(group.ratio, section.shared_parameters.method)
