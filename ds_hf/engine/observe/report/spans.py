"""What the time of a step is divided into, and how nested spans become times that add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["COLLECTIVE", "KINDS", "NEXT_BATCH", "Key", "Span", "kind_of", "self_times"]

# In the order in which pages show them: what the device computes, what it waits for, what lies outside of the engine.
KINDS = (
    "compute",
    "gather",
    "reduction",
    "tensor",
    "sequence",
    "experts",
    "pipeline",
    "update",
    "offload",
    "loader",
    "checkpoint",
    "evaluation",
    "collective",
    "script",
    "report",
)
NEXT_BATCH = "the next batch; workers:"  # the place of waits for a loader, before the number of its workers
COLLECTIVE = ("gather", "reduction", "tensor", "sequence", "experts", "collective")


class Key(NamedTuple):
    """What a span is.

    Attributes:
        kind: one of ``KINDS``.
        place: module, unit or phase, for people.
        operation: of a collective; "" for other spans.
        nbytes: that this rank puts into a collective.
        ranks: processes that take part in it.
    """

    kind: str
    place: str
    operation: str = ""
    nbytes: int = 0
    ranks: int = 1


class Span(NamedTuple):
    """A stretch of time: which key, seconds since the step began, how long, and inside how many others. Spans stand in
    the order of their beginnings."""

    key: int
    start: float
    seconds: float
    depth: int = 0


def kind_of(operation: str, what: str, axis: str) -> str:
    """The kind of a collective, from what its log says of it."""
    if axis in ("tensor", "sequence"):
        return axis
    if what.startswith(("tokens of", "numbers of tokens of", "gradients of tokens of")):
        return "experts"
    if what.startswith(("activations of", "gradients of the input of")):
        return "tensor"
    if what.startswith("the weights of"):
        return "gather"
    if what.startswith(("the gradients of", "the gradient norm", "an optimizer state")):
        return "reduction"
    return "sequence" if operation == "all-to-all" else "collective"


def self_times(spans: Sequence[Span]) -> Iterable[tuple[int, float]]:
    """The key of each span with what of its time is in no span inside it, in seconds."""
    own = [span.seconds for span in spans]
    around: list[int] = []
    for index, span in enumerate(spans):
        del around[span.depth :]
        if around:
            own[around[-1]] -= span.seconds
        around.append(index)
    return [(span.key, max(0.0, seconds)) for span, seconds in zip(spans, own, strict=True)]
