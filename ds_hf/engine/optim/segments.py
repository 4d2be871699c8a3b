"""Segments: the stretches of the masters that the inner optimizer takes for its parameters.

Segments of one buffer do not overlap and lie in order; what is between them is alignment and belongs to no parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.layout import Fragment

__all__ = ["Segment", "cut_segments", "take_over_state"]


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


def take_over_state(
    optimizer: Optimizer, segments_of: Mapping[GradientBuffer, Sequence[Segment]], *, whole: bool
) -> None:
    """Cut state that the inner optimizer already has for the model's parameters into state of the segments.

    Adagrad makes its sums at construction; an optimizer that has stepped before brings its moments.
    """
    before, optimizer.state = optimizer.state, defaultdict(dict)
    if not before:
        return
    elementwise = {
        key
        for param, state in before.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == logical_shape(param) and key != "step"
    }
    for gradient, segments in segments_of.items():
        buffer = gradient.buffer
        fragments = list(buffer.layout.fragments(buffer.axis.rank, whole=whole))
        for segment in segments:
            inside = [f for f in fragments if segment.start <= f.shard_start < segment.end]
            states = [before.get(buffer.params[f.slot.index], {}) for f in inside]
            for key, value in states[0].items():
                if key in elementwise:
                    value = torch.zeros_like(segment.param, dtype=value.dtype)
                    for fragment, state in zip(inside, states, strict=True):
                        start, length = fragment.shard_start - segment.start, fragment.numel
                        piece = state[key].reshape(-1)[fragment.start : fragment.start + length]
                        value.view(-1)[start : start + length].copy_(piece)
                optimizer.state[segment.param][key] = value
