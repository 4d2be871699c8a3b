"""Where a sequence of layers is cut into stages."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

__all__ = ["bounds_of", "part_of", "partition_balanced", "partition_by_cost", "partition_uniform", "stage_of"]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` stretches of ``num_items`` whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(num_items, num_parts)
    return [part * length + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` stretches of ``weights``, cut where DeepSpeed cuts them.

    Part by part, for each possible end, the cut before it is taken that leaves the heaviest and the lightest stretch so
    far nearest to each other; of equal ones the last. That decides greedily and need not be the best of all partitions.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0, *itertools.accumulate(weights)]
    spreads = [(0.0, math.inf), *[(math.inf, math.inf)] * count]  # (heaviest, lightest) of what ends at each place
    cuts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        chosen, before = [(math.inf, math.inf)] * part, [0] * part
        for end in range(part, count + 1):
            cut, spread = _nearest_cut(sums, spreads, end)
            chosen.append(spread)
            before.append(cut)
        spreads = chosen
        cuts.append(before)
    bounds = [count]
    for before in reversed(cuts):
        bounds.append(before[bounds[-1]])
    return bounds[::-1]


def _nearest_cut(
    sums: Sequence[float], spreads: Sequence[tuple[float, float]], end: int
) -> tuple[int, tuple[float, float]]:
    """Where the stretch that ends at ``end`` begins, and the spread of weights up to there."""
    best, found = math.inf, (0, (math.inf, math.inf))
    for cut in range(end):
        weight = sums[end] - sums[cut]
        heaviest, lightest = max(spreads[cut][0], weight), min(spreads[cut][1], weight)
        if heaviest - lightest <= best:
            best, found = heaviest - lightest, (cut, (heaviest, lightest))
    return found


def partition_by_cost(count: int, num_parts: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Bounds whose dearest part is as cheap as possible; no part is empty.

    Args:
        cost: of the items ``start`` to ``stop`` as part ``part``: ``cost(part, start, stop)``.
    """
    if count <= num_parts:
        return partition_uniform(count, num_parts)

    @functools.cache
    def best(part: int, start: int) -> tuple[float, tuple[int, ...]]:
        """Cost and bounds of the items from ``start`` on, from part ``part`` on."""
        if part == num_parts - 1:
            return cost(part, start, count), (start, count)
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for stop in range(start + 1, count - (num_parts - part - 1) + 1):
            rest, bounds = best(part + 1, stop)
            dearest = max(cost(part, start, stop), rest)
            if dearest < found[0]:
                found = dearest, (start, *bounds)
        return found

    return list(best(0, 0)[1])


def part_of(stage: int, chunk: int, stages: int, *, folded: bool = False) -> int:
    """The number of a chunk of a stage among the consecutive parts of the model.

    Args:
        folded: every other chunk goes from the last stage back to the first.
    """
    return chunk * stages + (stages - 1 - stage if folded and chunk % 2 else stage)


def stage_of(part: int, stages: int, *, folded: bool = False) -> int:
    """The stage that has a part of the model."""
    chunk, place = divmod(part, stages)
    return stages - 1 - place if folded and chunk % 2 else place


def bounds_of(parts: Sequence[int], stages: int, stage: int, *, folded: bool = False) -> list[tuple[int, int]]:
    """The layers ``(start, stop)`` of each chunk of ``stage``; ``parts`` cuts the layers into consecutive parts."""
    numbers = [part_of(stage, chunk, stages, folded=folded) for chunk in range((len(parts) - 1) // stages)]
    return [(parts[number], parts[number + 1]) for number in numbers]
