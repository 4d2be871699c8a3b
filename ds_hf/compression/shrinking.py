"""Which related modules, and which shared weights, make a smaller model that computes what the trained one did.

A model is trained with zeros, and is cut in the end: where something beside the zeros stays, or another thing is cut,
either the model no longer computes, after the training, or it computes something else. Both are told before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.compression.layers import is_conv1d, is_linear
from ds_hf.compression.scopes import Group, inputs_of, outputs_of
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.errors import Fault
from ds_hf.log import warn_once

__all__ = ["shrinking_faults", "tied_faults"]

_ZEROS = "leave related_modules out: zeros stay in their places then"
_ACTIVATION = re.compile("act", re.IGNORECASE)
_OF_HEADS = re.compile(r"(q|k|v|query|key|value)_?(norm|ln|layer)", re.IGNORECASE)
_KNOWS_HEADS = ("head_dim", "num_heads", "num_attention_heads", "n_heads", "n_head", "attention_head_size")


def shrinking_faults(named: Mapping[str, nn.Module], groups: list[Group]) -> Iterator[Fault]:
    """What of the groups with ``related_modules`` would not be the trained model when it is cut.

    Args:
        named: all modules of the model.
    """
    cut: dict[tuple[str, str], str] = {}  # (module, what is cut of it) -> the pruned layer
    for group in groups:
        for name in group.layers:
            if not group.related.get(name):
                continue
            yield from _adapted(named, group, name)
            yield from _elsewhere(named, group, name)
            for part in _parts(named, group, name):
                if part in cut:
                    both = f"of {part[0]} the {part[1]} would be cut twice, for {cut[part]} and for {name}"
                    yield _fault(group, both, "let one pattern, of one group, prune what belongs together")
                cut[part] = name
            if group.method == "head_pruning":
                yield from _heads(named, group, name)
            elif group.method == "row_pruning":
                yield from _rows(named, group, name)
            else:
                yield from _channels(named, group, name)


def _fault(group: Group, message: str, fix: str = _ZEROS) -> Fault:
    return Fault(f"{group.pointer}/related_modules", message, fix)


def _parent(named: Mapping[str, nn.Module], name: str) -> nn.Module:
    return named[name.rpartition(".")[0]]


def _parts(named: Mapping[str, nn.Module], group: Group, name: str) -> Iterator[tuple[str, str]]:
    """What is cut for ``name``, as ``clean`` does it."""
    heads, rows = group.method == "head_pruning", outputs_of(named[name])
    yield name, "inputs" if heads else "outputs"
    for other in group.related[name]:
        module = named[other]
        reads = not heads and not isinstance(module, nn.BatchNorm2d) and inputs_of(module) == rows
        flattened = group.method == "channel_pruning" and isinstance(module, nn.Linear)
        yield other, "inputs" if reads or flattened else "outputs"


def _adapted(named: Mapping[str, nn.Module], group: Group, name: str) -> Iterator[Fault]:
    for each in (name, *group.related[name]):
        if each.endswith(".base_layer"):
            message = f"{each} has an adapter, whose matrices would stay as large as they are"
            yield _fault(group, message, "merge the adapters first (merge_and_unload), or leave related_modules out")


def _elsewhere(named: Mapping[str, nn.Module], group: Group, name: str) -> Iterator[Fault]:
    """Related modules of another block, where this one has the same."""
    mine = _places(name)
    for other in group.related[name]:
        words, places = other.split("."), _places(other)
        for depth, (here, there) in enumerate(zip(mine, places, strict=False)):
            if here != there:
                at = [index for index, word in enumerate(words) if word.isdecimal()][depth]
                own = ".".join([*words[:at], here, *words[at + 1 :]])
                if own in named and own != name:
                    message = f"{other} is of another block than {name}, which has {own}"
                    yield _fault(group, message, f"name {own}, or what all blocks have in common")
                break


def _places(name: str) -> list[str]:
    """The numbers of the containers in which a module lies."""
    return [word for word in name.split(".")[:-1] if word.isdecimal()]


def _beside(named: Mapping[str, nn.Module], name: str, but: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the same module as ``name``, without those ``but``."""
    for child, module in _parent(named, name).named_children():
        full = f"{name.rpartition('.')[0]}.{child}".lstrip(".")
        if full not in but:
            yield full, module


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(named: Mapping[str, nn.Module], group: Group, name: str) -> Iterator[Fault]:
    layer, parent = named[name], _parent(named, name)
    if any(isinstance(vars(parent).get(key), int) for key in _KNOWS_HEADS) and "ttention" in type(parent).__name__:
        message = f"{name} makes queries, keys or values, whose rows are heads"
        yield _fault(group, message, "take head_pruning, of the layer that reads them")
        return
    if "." in name and inputs_of(layer) != outputs_of(layer) and outputs_of(layer) in _widths_between(named, name):
        message = f"{name} writes into what all blocks read and add to, which would keep its width"
        yield _fault(group, message, f"take the layers whose rows {name} reads, and leave it to related_modules")
        return
    blocks = "." in name  # in a flat model layers of the same shape need not belong together
    for other, module in _beside(named, name, (name, *group.related[name])) if blocks else ():
        if is_linear(module) and (inputs_of(module), outputs_of(module)) == (inputs_of(layer), outputs_of(layer)):
            message = f"{other} stands beside {name}, has its shape and would stay as large as it is"
            yield _fault(group, message, f"add {other.rpartition('.')[2]} to the list")
    for key, function in (*parent.named_children(), *vars(parent).items()):
        at_zero = _at_zero(function) if _ACTIVATION.search(key) else None
        if at_zero:
            yield _fault(
                group, f"the activation after {name} makes {at_zero:.2g} of zeros, which the trained model reads"
            )


def _widths_between(named: Mapping[str, nn.Module], layer: str) -> set[int]:
    """Of what goes from block to block: embeddings make it, and a norm of the whole of it stands in the block of
    ``layer``; other towers of the model have other widths."""
    widths = [module.embedding_dim for module in named.values() if isinstance(module, nn.Embedding)]
    norms: list[int] = []
    words = layer.split(".")
    depth = next((index + 1 for index, word in enumerate(words) if word.isdecimal()), 0)
    block = "".join(f"{word}." for word in words[:depth])  # the outermost one, which has all of its norms
    for name, module in named.items():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and "." in name and isinstance(weight, Tensor):
            norms += [shape[0]] if name.startswith(block) and len(shape := logical_shape(weight)) == 1 else []
    return {width for width in widths if width in norms}


def _at_zero(function: Any) -> float | None:
    """What an activation makes of zero; ``None`` of what cannot be asked."""
    if not callable(function) or (isinstance(function, nn.Module) and any(True for _ in function.parameters())):
        return None
    try:
        with torch.no_grad():
            made = function(torch.zeros(1))
        return float(made) if isinstance(made, Tensor) else None
    except Exception:  # any function may stand under such a name, and say in any way that it takes something else
        return None


# -- heads -------------------------------------------------------------------------------------------------------------


def _heads(named: Mapping[str, nn.Module], group: Group, name: str) -> Iterator[Fault]:
    width = inputs_of(named[name])
    rows = {outputs_of(named[other]) for other in group.related[name]}
    for other in group.related[name]:
        if outputs_of(named[other]) == 3 * width and not is_conv1d(named[other]):
            message = f"{other} makes queries, keys and values in one layer, in an order that cannot be told"
            yield _fault(group, message)
            return
    cut, reads = (name, *group.related[name]), {inputs_of(named[other]) for other in group.related[name]}
    # in the module of the queries, which may be another than that of the layer after attention
    queries = group.related[name][0]
    for other, module in _beside(named, queries, cut) if "." in queries else ():  # not in a flat model, as of rows
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        shape, last = logical_shape(weight), other.rpartition(".")[2]
        if is_linear(module):
            if inputs_of(module) in reads and outputs_of(module) in rows | {width}:
                yield _fault(group, f"{other} makes heads as well, and would keep them", f"add {last} to the list")
        elif len(shape) == 1 and _OF_HEADS.match(last) and shape[0] in rows | {width}:
            yield _fault(group, f"{other} is over the values of all heads, and would be over fewer")
        elif len(shape) == 2 and _count(group) in shape:
            yield _fault(group, f"{other} has values of each head, and would keep them")


def _count(group: Group) -> int:
    heads: Any = getattr(group.section.shared_parameters, "num_heads", None)
    return int(heads or 1)


# -- channels ----------------------------------------------------------------------------------------------------------


def _channels(named: Mapping[str, nn.Module], group: Group, name: str) -> Iterator[Fault]:
    for each in (name, *group.related[name]):
        module = named[each]
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            yield _fault(group, f"{each} is a convolution of {module.groups} groups, which channels would change")
    if any(isinstance(named[other], nn.BatchNorm2d) for other in group.related[name]):
        return  # which of several norms is this one's is not told by their order
    rows, following = outputs_of(named[name]), False
    for other, module in _beside(named, name, ()):
        if following and isinstance(module, nn.Conv2d | nn.Linear):
            break
        if following and isinstance(module, nn.BatchNorm2d) and module.num_features == rows:
            last = other.rpartition(".")[2]
            message = f"{other} is over the channels of {name}, and would keep all of them"
            yield _fault(group, message, f"add {last} to the list")
        following |= other == name


# -- weights of several modules ----------------------------------------------------------------------------------------


def tied_faults(model: nn.Module, groups: list[Group]) -> Iterator[Fault]:
    """Modules that share a weight and compress it in two ways: in the end it has one value. Of those that do not
    compress it, a line is told."""
    acts: dict[str, list[tuple[str, str]]] = {}
    for group in groups:
        if group.method != "activation_quantization":
            for name in group.layers:
                acts.setdefault(name, []).append((group.method, group.pointer))
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(name)
    for names in owners.values():
        ways = [acts.get(name, []) for name in names]
        acting = [way for way in ways if way]
        if any(way != acting[0] for way in acting):
            methods = ", ".join(dict.fromkeys(method for way in acting for method, _ in way))
            message = f"{' and '.join(names)} share a weight, and would compress it in different ways ({methods})"
            yield Fault(next(way for way in acting if way)[-1][1], message, "let one group find both")
        elif acting and len(acting) < len(ways):
            plain = ", ".join(name for name, way in zip(names, ways, strict=True) if not way)
            warn_once(
                f"compression_training: {plain} shares its weight with a layer that is compressed. It computes with "
                "the whole weight during training, and with the compressed one after redundancy_clean(): name both in "
                "modules, or leave both out"
            )
