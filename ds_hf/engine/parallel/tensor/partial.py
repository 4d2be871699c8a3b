"""Whole parameters that compute with a part of the activations: kinds that plans leave out, and all others by the graph
of the first call.

Between a layer that is cut by its outputs and one that is cut by its inputs each process has other activations. What a
whole parameter gives there has a part of its gradient on each process, which is the sum of the parts; everywhere else
each process computes the same, whole gradient. A plan says which is which (``replicated_with_grad_allreduce``), and
several of transformers' leave norms of queries and keys out: training would follow the mean of the parts, silently.

The walk begins at the first output, which is whole, and changes sides at the functions of ``functions``. What a cut
parameter gives that it meets on the whole side is taken for all; frozen ones are seen by ``reads``. It is done again
of the loss with which the script goes backward. Behind a node that hides what it computes (compiled code, other
functions written in Python) nothing is concluded until the next.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ds_hf.engine.events import Observer, Phase
from ds_hf.engine.parallel.tensor.functions import SIDES
from ds_hf.engine.parallel.tensor.gathered import was_gathered
from ds_hf.engine.parallel.tensor.heads import layer_of
from ds_hf.engine.parallel.tensor.reads import KNOWING, PartRead, PartReads
from ds_hf.engine.parallel.tensor.styles import ALONE, Style, place_of
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.hooks import Hook
from ds_hf.engine.zero.replicas import is_summed_over_tensor
from ds_hf.engine.zero.unit import tensors_in
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["attach", "sides_of", "unplanned"]

_UNKNOWN, _GIVEN = "unknown", "given"


class _Division(Protocol):
    """What is looked at of a ``plan.Slicing``."""

    name: str
    module: nn.Module
    style: Style


def unplanned(model: nn.Module, divisions: Sequence[_Division]) -> list[tuple[str, nn.Module, list[str]]]:
    """What has whole parameters and sees a part of what a cut layer gives, so that each process has a part of their
    gradient, where transformers' plans do not say so: activations with parameters (xIELU of Apertus, PReLU) and norms
    of each head's queries or keys (Qwen3-VL-MoE, Sarvam) beside a layer that is cut by its outputs, and what is inside
    of an embedding (Inkling's norm). By name, module and the names of its own parameters."""
    modules, known = dict(model.named_modules()), {id(division.module) for division in divisions}
    found: dict[int, tuple[str, nn.Module, list[str]]] = {}
    for division in divisions:
        if division.style.cuts == "rows":
            for key, child in division.module.named_modules():
                own = [name for name, param in child._parameters.items() if param is not None]
                if key and own:
                    found[id(child)] = (f"{division.name}.{key}", child, own)
        if division.style.cuts != "out" or division.style.gathers:
            continue
        above = layer_of(division.name).rpartition(".")[0]
        for key, child in modules[above].named_children():
            own = [name for name, param in child._parameters.items() if param is not None]
            learned = isinstance(child, nn.PReLU) or type(child).__module__ == "transformers.activations"
            if own and id(child) not in known and (learned or _is_norm_of_heads(key, child, modules[above], model)):
                name = f"{above}.{key}" if above else key
                found[id(child)] = (name, child, own)
    return [*found.values()]


_NORMS_OF_HEADS = re.compile(r"(q|k|query|key)_?(layer)?_?norm")


def _is_norm_of_heads(key: str, child: nn.Module, attention: nn.Module, model: nn.Module) -> bool:
    """One of the whole width would not fit a part of it."""
    config = getattr(attention, "config", None) or getattr(model, "config", None)
    width = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    shapes = [tuple(logical_shape(param)) for param in child._parameters.values() if param is not None]
    return _NORMS_OF_HEADS.fullmatch(key) is not None and all(shape == (width,) for shape in shapes)


def attach(engine: Any) -> None:
    """Read the graph of the first call of ``engine`` that has one, and of the first loss; what is wrong is raised
    there, on all processes."""
    engine.events.add(_First(engine))


class _First(Observer):
    """Of an engine: the first output and the first loss with a graph."""

    def __init__(self, engine: Any) -> None:
        self.events, self.model = engine.events, engine.module  # the model's hooks do not keep the engine
        section = engine.settings.tensor_parallel
        self.planned = section.partition_config is None and section.preset_model is None
        self.reads = PartReads(self.model)
        self._output = False
        # of a copy, which an engine does not train, they are nothing
        self._handles = [
            self.model.register_forward_pre_hook(Hook(self._before)),
            self.model.register_forward_hook(Hook(self._after)),
        ]

    def _before(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.reads.begin()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        first = _with_graph(output)
        if first is not None and not self._output:
            self._output = True  # the loss or the logits; a cache of keys behind them is of the heads that are here
            _check(module, sides_of(first), planned=self.planned)
            of_loss = first.dim() == 0
            _check_cut(module, _wholes(sides_of(first, taken=of_loss)), of_loss=of_loss)

    def on_phase(self, name: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExitStack | None:
        if name not in ("backward", "own backward"):
            return None
        loss = _with_graph((args, kwargs))
        if loss is not None and self._output:
            _check(self.model, sides_of(loss), planned=self.planned)
            _check_cut(self.model, _wholes(sides_of(loss, taken=True)), of_loss=True)
        after = ExitStack()
        after.push(self._over)
        return after

    def _over(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.close()
        if kind is None and self.reads.hidden:
            # of layers that give wholes: what a block makes of others may be right
            alone = {id(p) for m in self.model.modules() if isinstance(m, ALONE) for p in m._parameters.values()}
            _check_cut(self.model, self.reads.hidden & alone, of_loss=True)

    def close(self) -> None:
        self.events.remove(self)
        self.reads.end()
        while self._handles:
            self._handles.pop().remove()


def _with_graph(value: Any) -> Tensor | None:
    return next((tensor for tensor in tensors_in(value) if tensor.grad_fn is not None), None)


def sides_of(output: Tensor, *, taken: bool = False) -> Mapping[int, set[str]]:
    """By the id of each parameter behind ``output``: "whole" or "part", as its gradient comes, or both; "given" where
    a function of other libraries, such as a fused loss, takes it for a whole.

    Args:
        taken: only where all of it is needed at once: something is multiplied by it, or looked up in it, or its norm or
            mean is taken. A penalty that is a sum over elements has on a part the gradient that one on the whole has.
    """
    found: dict[int, set[str]] = defaultdict(set)
    nodes: list[tuple[Any, str, bool, bool]] = [(output.grad_fn, "whole", not taken, False)]
    seen = set(nodes)
    while nodes:
        node, side, counts, curved = nodes.pop()
        if (key := _param_of(node)) is not None:
            if counts:
                found[key].add(side)
            continue
        name = node.name()
        if isinstance(node, BackwardCFunction):
            given = getattr(type(node), "_forward_cls", object)
            foreign = side == "whole" and given.__module__.partition(".")[0] not in {"torch", *KNOWING}
            side = SIDES.get(given, _GIVEN if foreign else _UNKNOWN)
            counts |= foreign
        elif "CppNode" in name or (side == _GIVEN and not _SAME_VALUES.match(name)):
            side = _UNKNOWN  # functions in C++, collectives of torch among them
        if taken and (name.startswith("SumBackward") or getattr(node, "_saved_reduction", None) == 2):
            counts = curved  # the sum of a part goes into sums, but not into a root
        elif taken:
            counts = counts or _OF_ALL.search(name) is not None
            curved = curved or _CURVED.search(name) is not None
        for following, _ in node.next_functions:
            if following is not None and (following, side, counts, curved) not in seen:
                seen.add((following, side, counts, curved))
                nodes.append((following, side, counts, curved))
    return found


_SAME_VALUES = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|Unsqueeze|Squeeze|Expand|Slice|ToCopy|Clone|Alias)\w*Backward"
)
_NORMS = "Norm|Var|Std|Loss|KlDiv|Softmax|Logsumexp|(Max|Min|Amax|Amin|Prod)Backward|Linalg"
_OF_ALL = re.compile(f"mm|Mm|mv|Mv|Dot|Linear|Embedding|Index|Gather|Convolution|Bilinear|Mean|{_NORMS}")
_CURVED = re.compile(f"Sqrt|Pow|Log|Exp|{_NORMS}")


def _param_of(node: Any) -> int | None:
    """The id of the parameter for whose gradient, or frozen part, ``node`` stands."""
    if hasattr(node, "variable"):
        return id(node.variable)
    if getattr(type(node), "_forward_cls", None) is not PartRead:
        return None
    node.seen = True
    return cast(int, node.param)


def _check(model: nn.Module, sides: Mapping[int, set[str]], *, planned: bool) -> None:
    """
    Args:
        planned: the model says itself how it is divided, and no rules of the file.

    Raises:
        ConfigError: the gradient of a parameter would be another than the model's.
    """
    faults = []
    for name, param in model.named_parameters():
        summed = is_summed_over_tensor(param)
        if is_cut(param) or not param.requires_grad or summed is False:
            continue
        wrong = "whole" if summed else "part"
        if wrong in sides.get(id(param), ()):
            faults.append(name)
    if not faults:
        return
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    every = re.sub(r"(?<=\.)\d+(?=\.)", "*", faults[0])
    fix = "leave the layers around it whole"
    if planned:
        fix = (
            f'say so before initialize(): model._tp_plan["{every}"] = "replicated_with_grad_allreduce", or '
            f'"replicate" for its module where it sees all heads and features after all; or {fix}'
        )
    raise ConfigError(
        [
            Fault(
                "/tensor_parallel",
                f"{', '.join(faults[:3])}{more}: whole on each process, and computing with a part of the activations "
                "(or said to do so, and not doing it), so that their gradients would be wrong",
                fix,
            )
        ],
        "tensor parallelism",
    )


def _wholes(sides: Mapping[int, set[str]]) -> set[int]:
    return {param for param, found in sides.items() if found & {"whole", _GIVEN}}


def _check_cut(model: nn.Module, wholes: Set[int], *, of_loss: bool) -> None:
    """What a cut layer gives in part goes through a function of ``functions`` before it is taken for a whole. A part of
    the logits that a script gets may be what it wants, so that is a warning.

    Args:
        wholes: ids of parameters that are taken for wholes.

    Raises:
        ConfigError: the loss is computed of a part.
    """
    parts = [
        name
        for path, module in model.named_modules()
        if place_of(module) is not None
        for name, param in module.named_parameters(path, recurse=False)
        if is_cut(param) and id(param) in wholes and not was_gathered(param)
    ]
    if not parts:
        return
    layer = layer_of(parts[-1].rpartition(".")[0])
    result = "the loss" if of_loss else "what the model returns"
    what = (
        f"{', '.join(parts[:3])}: each process has a part, and {result} is computed of that part as if it were all: "
        "the layer's outputs are not gathered, or its weight is used without calling the layer"
    )
    fix = (
        f'call {layer}, with "gather_output": true in its rule where it has one, or leave it whole ("partition_type": '
        '"skip", or "replicate" in the model\'s _tp_plan, and no "vocab_parallel_lm_head"); '
        "a penalty on weights has to be a sum over their elements, (p ** 2).sum(), not a norm or a mean"
    )
    if of_loss:
        raise ConfigError([Fault("/tensor_parallel", what, fix)], "tensor parallelism")
    warn_once(f"tensor parallelism: {what}; {fix}")
