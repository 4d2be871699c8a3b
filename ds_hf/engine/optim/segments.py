"""Segments: the stretches of the masters that the inner optimizer takes for its parameters.

Segments of one buffer do not overlap and lie in order; what is between them is alignment and belongs to no parameter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.layout import Fragment
from ds_hf.errors import ConfigError

__all__ = ["Segment", "cut_segments", "fragments_of", "part_segments", "take_over_state"]


@dataclass(eq=False)
class Segment:
    """A stretch of one buffer's master, updated by one parameter group.

    Attributes:
        gradient: gradient buffer it takes its gradient from.
        group: index of the parameter group.
        start, end: elements of the owned tensor.
        shape: the parameter's shape when the segment is exactly one whole parameter handled on its own, else flat.
        param: the master weights as the inner optimizer sees them ...
        low: ... and their low bits, where they are split: ``param`` is the high one then.
        active: the present step updates it: its parameters are not frozen.
        fragment: the part of a parameter that it is, where the rule looks at whole parameters.
    """

    gradient: GradientBuffer
    group: int
    start: int
    end: int
    shape: torch.Size
    param: nn.Parameter
    fragment: Fragment | None = None
    low: Tensor | None = None
    active: bool = True


def cut_segments(
    gradient: GradientBuffer,
    indices: Sequence[int],
    master: Tensor,
    low: Tensor | None = None,
    *,
    whole: bool,
    elementwise: bool,
) -> Iterator[Segment]:
    """Stretches of the owned tensor: one a group where the rule is elementwise, else one a parameter.

    Args:
        indices: the parameter group of each of the buffer's parameters.
        master: over what this rank owns.
        low: where that is the high half of the master, the low one.
        whole: every rank owns everything.
    """
    runs: list[tuple[int, int, int, Fragment | None]] = []
    for fragment in gradient.buffer.layout.fragments(gradient.buffer.axis.rank, whole=whole):
        group, start = indices[fragment.slot.index], fragment.shard_start
        end = start + fragment.numel
        if elementwise and runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1], end, None)
        else:
            runs.append((group, start, end, None if elementwise else fragment))
    for group, start, end, piece in runs:
        shape = piece.slot.shape if piece is not None and piece.whole else torch.Size([end - start])
        param = nn.Parameter(master[start:end].view(shape), requires_grad=True)
        rest = None if low is None else low[start:end].view(shape)
        yield Segment(gradient, group, start, end, shape, param, piece, rest)


def part_segments(
    optimizer: Optimizer, segments: Sequence[Segment], keys: Sequence[Hashable], *, whole: bool
) -> list[Segment]:
    """Cut the segments of one buffer further, so that each has parameters with the same key; states follow.

    Args:
        keys: of each of the buffer's parameters.
        whole: as ``cut_segments``.
    """
    found: list[Segment] = []
    for segment, inside in fragments_of(segments, whole=whole):
        runs = [list(run) for _, run in groupby(inside, key=lambda fragment: keys[fragment.slot.index])]
        if len(runs) < 2:
            found.append(segment)
            continue
        state = optimizer.state.pop(segment.param, {})
        for run in runs:
            part = _part(segment, run[0].shard_start, run[-1].shard_start + run[-1].numel)
            found.append(part)
            if state:
                first, last = part.start - segment.start, part.end - segment.start
                optimizer.state[part.param] = {key: _state_of(v, segment, first, last) for key, v in state.items()}
    return found


def fragments_of(segments: Sequence[Segment], *, whole: bool) -> Iterator[tuple[Segment, list[Fragment]]]:
    """Each of the segments of one buffer, and the parts of parameters that are in it."""
    buffer = segments[0].gradient.buffer if segments else None
    fragments = list(buffer.layout.fragments(buffer.axis.rank, whole=whole)) if buffer is not None else []
    for segment in segments:
        yield segment, [f for f in fragments if segment.start <= f.shard_start < segment.end]


def _part(segment: Segment, start: int, end: int) -> Segment:
    """The elements ``start`` to ``end`` of the owned tensor."""
    inside = slice(start - segment.start, end - segment.start)
    param = nn.Parameter(segment.param.data.view(-1)[inside], requires_grad=True)
    low = None if segment.low is None else segment.low.view(-1)[inside]
    return Segment(segment.gradient, segment.group, start, end, param.shape, param, None, low, segment.active)


def _state_of(value: Any, segment: Segment, first: int, last: int) -> Any:
    """Of some elements of the segment: of moments a view, of a counter one of their own."""
    if not isinstance(value, Tensor):
        return value
    return value.view(-1)[first:last] if value.dim() and value.numel() == segment.param.numel() else value.clone()


def take_over_state(
    optimizer: Optimizer, segments_of: Mapping[GradientBuffer, Sequence[Segment]], *, whole: bool
) -> None:
    """Cut state that the inner optimizer already has for the model's parameters into state of the segments.

    Adagrad makes its sums at construction; an optimizer that has stepped before brings its moments.
    """
    _follow_overrides(optimizer, (segment for segments in segments_of.values() for segment in segments))
    before, optimizer.state = optimizer.state, defaultdict(dict)
    if not before:
        return
    _fill_empty(optimizer, before)
    for gradient, segments in segments_of.items():
        buffer = gradient.buffer
        for segment, inside in fragments_of(segments, whole=whole):
            params = [buffer.params[f.slot.index] for f in inside]
            states = [before.get(param, {}) for param in params]
            for key, value in states[0].items():
                if key != "step" and _is_elementwise(optimizer, key, params, states):
                    value = torch.zeros_like(segment.param, dtype=value.dtype)
                    for fragment, state in zip(inside, states, strict=True):
                        start, length = fragment.shard_start - segment.start, fragment.numel
                        piece = state[key].reshape(-1)[fragment.start : fragment.start + length]
                        value.view(-1)[start : start + length].copy_(piece)
                optimizer.state[segment.param][key] = value


def _is_elementwise(
    optimizer: Optimizer, key: str, params: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether the state ``key`` has an element for each of the parameters of a segment.

    Raises:
        ConfigError: it has for some of several, so that they have nothing in common.
    """
    shapes = [getattr(state.get(key), "shape", None) for state in states]
    alike = [shape == logical_shape(param) for shape, param in zip(shapes, params, strict=True)]
    if any(alike) and not all(alike) and any(shape for shape in shapes):
        raise ConfigError(
            f"{type(optimizer).__name__} has a state {key!r} of the shapes {[tuple(shape or ()) for shape in shapes]} "
            f"for parameters of {[tuple(logical_shape(param)) for param in params]}, which are updated together: give "
            "initialize() the optimizer before its first step",
            "initialize(optimizer=...)",
        )
    return all(alike)


def _follow_overrides(optimizer: Optimizer, segments: Iterable[Segment]) -> None:
    """Give segments the settings of single parameters that bitsandbytes' manager knows by ``id``: the Trainer asks for
    embeddings in 32 bits so."""
    manager = getattr(optimizer, "mng", None)
    known = getattr(manager, "pid2config", None)
    if not isinstance(known, dict):
        return
    asked = getattr(manager, "module_weight_config_triple", ())
    of = {**known, **{id(getattr(module, name, None)): config for module, name, config in asked}}
    for segment in segments:
        if segment.fragment is None or id(segment.param) in known:
            continue
        config = of.get(id(segment.gradient.buffer.params[segment.fragment.slot.index]))
        if config is not None:
            known[id(segment.param)] = config
            weakref.finalize(segment.param, known.pop, id(segment.param), None)


def _fill_empty(optimizer: Optimizer, before: Mapping[Any, dict[str, Any]]) -> None:
    """Give state that was made of parameters at rest, which are empty, the parameter's shape: Adagrad's sums.

    Raises:
        ConfigError: nothing says what another optimizer would have filled it with.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            shape = logical_shape(param)
            for key, value in before.get(param, {}).items():
                if not isinstance(value, Tensor) or value.numel() or not shape.numel():
                    continue
                fill = group.get("initial_accumulator_value")
                if key != "sum" or fill is None:
                    raise ConfigError(
                        f"{type(optimizer).__name__} made its state {key!r} of a parameter whose values were not here "
                        f"(of shape {tuple(shape)}; zero.Init or an engine before has divided it): give initialize() "
                        "a function that makes it, optimizer=lambda params: ..., beside model_parameters",
                        "initialize(optimizer=...)",
                    )
                before[param][key] = torch.full(shape, float(fill), dtype=value.dtype, device=value.device)
