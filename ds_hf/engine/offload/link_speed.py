"""How fast the link between a device and the host is while both directions are busy; measured, in some 10 ms.

Bytes a second in each direction. The slower of the two counts, as states go up and down in equal parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.memory import host_empty

__all__ = ["speed_both_ways"]

_NBYTES = 32 << 20  # each way in a round: 0.7 ms at 50 GB/s
_ROUNDS = 8
_LONGEST = 0.02  # seconds; a slow link has shown that it is one by then


def speed_both_ways(link: HostLink, ready: Callable[[], None]) -> float:
    """What the link moves each way at once. Nothing else may be on its way.

    Args:
        ready: called when the memory is there; returns when all who share the host's memory have got as far.
    """
    host = [host_empty(_NBYTES, torch.uint8, pinned=True) for _ in range(2)]
    above = [torch.empty(_NBYTES, dtype=torch.uint8, device=link.device) for _ in range(2)]
    _round(link, host, above)  # the first copies of a process take longer
    ready()
    rounds, start = 0, time.perf_counter()
    while rounds < _ROUNDS and time.perf_counter() - start < _LONGEST:
        _round(link, host, above)
        rounds += 1
    took = time.perf_counter() - start
    link.close()  # it keeps what went down last, until more does
    return rounds * _NBYTES / took


def _round(link: HostLink, host: list[Tensor], above: list[Tensor]) -> None:
    arrivals = [link.up(above[0], host[0]), link.down(host[1], above[1])]
    for arrival in arrivals:
        arrival.on_host()
