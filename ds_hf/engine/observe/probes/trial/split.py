"""Where the time of one step goes, from torch's profiler.

With a GPU: its kernels on a line of time. Compute is what runs on it; communication, which is NCCL's and copies from
other GPUs and over the link to the host, what runs while nothing else does; what is left is idle: the host did not keep
up. Without one: gloo's collectives, in which the ranks stand still.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ds_hf.engine.observe.probes.trial.batches import Batch

if TYPE_CHECKING:
    from ds_hf.engine.observe.probes.trial.replay import Replay

__all__ = ["covered", "split_of"]

Span = tuple[float, float]

# In the names of what brings values from elsewhere: collectives, comm/peers (copies, its barrier, its sum), offload.
_COMMUNICATION = ("gloo:", "nccl", "Memcpy PtoP", "barrier_kernel", "sum_parts", "Memcpy HtoD", "Memcpy DtoH")


def split_of(replay: Replay, batch: Batch, accumulation: int) -> dict[str, float]:
    """Shares of one step's time by kind: "compute", "communication" (not hidden behind compute), "idle"."""
    cuda = replay.engine.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with torch.compiler.set_stance("default"), profile(activities=activities) as profiler:
        replay.step(batch, accumulation)
        if cuda:
            torch.cuda.synchronize(replay.engine.device)
    found = list(profiler.events() or ())
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in found if _counts(e, cuda)]
    if not spans:
        return {}
    talk = [(start, end) for start, end, name in spans if _is_communication(name)]
    work = [(start, end) for start, end, name in spans if not _is_communication(name)]
    whole = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    if not cuda:
        exposed = covered(talk)
        return {"compute": 1 - exposed / whole, "communication": exposed / whole, "idle": 0.0}
    busy, busy_with_talk = covered(work), covered([*work, *talk])
    return {
        "compute": busy / whole,
        "communication": (busy_with_talk - busy) / whole,
        "idle": 1 - busy_with_talk / whole,
    }


def _counts(event: Any, cuda: bool) -> bool:
    on_device = event.device_type == DeviceType.CUDA
    return bool(on_device == cuda and event.time_range.end > event.time_range.start)


def _is_communication(name: str) -> bool:
    return any(part in name for part in _COMMUNICATION)


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of ``spans``."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
