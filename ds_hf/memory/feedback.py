"""What few bits between processes keep on the device between steps: what rounding has lost, and messages.

1-bit optimizers keep an error for each parameter and for this process's part of the means, two messages for each buffer
and the values of the largest (``engine.optim.onebit.exchange``); LoCo an error for each gradient that is sent
(``engine.comm.block_collectives``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_hf.config.plan import StatePlan
from ds_hf.engine.optim.onebit.exchange import kept_nbytes, scratch_nbytes
from ds_hf.engine.zero.layout import FlatLayout

__all__ = ["loco_nbytes", "one_bit_nbytes"]


def one_bit_nbytes(numels: Iterable[int], processes: int) -> int:
    """Of a 1-bit optimizer whose buffers have ``numels`` parameters."""
    known = list(numels)
    if processes == 1 or not known:
        return 0
    return sum(kept_nbytes(numel, processes) for numel in known) + scratch_nbytes(max(known), processes)


def loco_nbytes(layouts: Iterable[FlatLayout], plan: StatePlan) -> int:
    """Of LoCo, for gradients that lie as ``layouts`` say, each divided over its own processes."""
    if plan.loco is None or not plan.gradients.bits:
        return 0
    total = 0
    for layout in layouts:
        processes = layout.numel // max(layout.shard_numel, 1)
        if processes == 1:
            continue
        total += 2 * layout.numel
        first = plan.first_hop
        if first != "auto" and 1 < first < processes:  # "auto": predictions are for one host
            total += 2 * layout.numel // first
    return total
