"""Where the bytes of an engine are: a row for each kind of state, dtype and device, of this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_hf.config.optimizer_traits import most_moments
from ds_hf.engine.zero.buffer import home_of

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["SHORT", "States", "states_of"]

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class States:
    """Some of what a process keeps all the time.

    Attributes:
        device: where; numel: elements of this process; nbytes: of them.
    """

    name: str
    dtype: str
    device: str
    numel: int
    nbytes: int


def states_of(engine: CoreEngine) -> Iterator[States]:
    """Rows of the table, each of one dtype on one device."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, dtype, device, numel in _tensors(engine):
        key = name, SHORT.get(dtype, str(dtype).removeprefix("torch.")), device
        before = found.get(key, (0, 0))
        found[key] = before[0] + numel, before[1] + numel * dtype.itemsize
    for key, (numel, nbytes) in found.items():
        yield States(*key, numel, nbytes)


def _tensors(engine: CoreEngine) -> Iterator[tuple[str, torch.dtype, str, int]]:
    """(what it is, dtype, device, elements on this process) of all that is kept between steps."""
    plan, optimizer, here = engine.plan, engine.optimizer, engine.device.type
    for buffer in (buffer for unit in engine.units for buffer in unit.buffers):
        numel = buffer.layout.shard_numel if buffer.sharded else buffer.layout.numel
        device = here if plan.parameters.device == "device" or not buffer.sharded else plan.parameters.device
        yield "frozen parameters" if buffer.frozen else "parameters", buffer.dtype, device, numel
    for param in (param for param in engine.module.parameters() if home_of(param) is None):
        yield "weights in few bits", param.dtype, param.device.type, param.numel()
    if optimizer is not None:
        away = None if plan.optimizer.device == "device" else plan.optimizer.device
        for gradient in engine.reducer.buffers:
            layout = gradient.buffer.layout
            numel = layout.shard_numel if plan.reduces_every_micro_batch else layout.numel
            yield "gradients", gradient.dtype, away or here, numel
        moments = most_moments(type(optimizer.optimizer).__name__)
        for buffer, master in optimizer.masters.items():
            beside = optimizer.low_bits.get(buffer, master)
            if beside.data_ptr() != buffer.owned(whole=optimizer.policy.whole, write=False).data_ptr():
                yield "master weights", beside.dtype, away or here, beside.numel()
            if moments:
                yield "moments", optimizer.moment_dtype(buffer), away or here, moments * master.numel()
    for values in engine.module.buffers():
        yield "buffers", values.dtype, values.device.type, values.numel()
