"""What an engine says of itself: a line when it is built, and those that ``steps_per_print`` asks for.

Rank 0 speaks. The first goes to the log, as information; what the user asked for goes to standard output. Nothing here
communicates.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_hf.engine.observe.states import SHORT, States, states_of
from ds_hf.engine.ops.library import choose
from ds_hf.engine.optim.base import TensorwiseOptimizer
from ds_hf.engine.optim.streaming import streamed_update
from ds_hf.engine.zero.buffer import home_of
from ds_hf.log import announce, logger, own_version, say

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine
    from ds_hf.engine.observe.model_flops import Tokens

__all__ = ["EngineSummary", "attach", "introduce", "precisions", "summary_of"]


@dataclass(frozen=True)
class EngineSummary:
    """What an engine is, as ``engine.summary()`` gives it; as a text it is the line with which a run begins.

    Attributes:
        version: of ds_hf. stage: of ZeRO. mesh: sizes of its axes, in words.
        processes, device: how many, and what each computes on.
        precision: dtypes of each row of the model states, see ``precisions``.
        parameters, trained: elements of the model, and how many train; of this process's part where layers, experts or
            a pipeline's stages are ``divided``.
        optimizer: its class, ``None`` for an engine that only infers; kernels: what updates.
        micro, accumulation, data, batch: samples, micro-batches, processes, and their product.
        notes: what is offloaded, compiled, captured, divided or sent in few bits.
        states: what this process keeps, a row of the table each. Moments come with the first step.
    """

    version: str
    stage: int
    mesh: str
    processes: int
    device: str
    precision: dict[str, str]
    parameters: int
    trained: int
    divided: bool
    optimizer: str | None
    kernels: str
    micro: int
    accumulation: int
    data: int
    batch: int
    notes: tuple[str, ...]
    states: tuple[States, ...]

    def __str__(self) -> str:
        masters = self.precision.get("master weights")
        dtypes = self.precision.get("parameters") or self.precision.get("frozen parameters", "none")
        trained = "" if self.trained == self.parameters else f" ({self.trained:,} train)"
        several = f"{self.processes} process{'es' * (self.processes > 1)}"
        parts = [
            f"ds_hf {self.version}: ZeRO stage {self.stage}, {several} ({self.mesh}) on {self.device}",
            f"{self.parameters:,} parameters{' of this process' * self.divided}{trained} in {dtypes}"
            + (f" with {masters} masters" if masters not in (None, dtypes) else ""),
            f"{self.optimizer} by {self.kernels}" if self.optimizer else "no optimizer",
            f"batch {self.batch} = {self.micro} micro-batch x {self.accumulation} accumulation x {self.data} data",
            *self.notes,
        ]
        return ", ".join(parts)

    def table(self) -> str:
        """Where the bytes of this process's states go; activations come on top."""
        rows = [
            (row.name, row.dtype, row.device, f"{row.numel:,}", f"{row.nbytes / 2**20:,.1f}") for row in self.states
        ]
        rows.append(("in all", "", "", "", f"{sum(row.nbytes for row in self.states) / 2**20:,.1f}"))
        rows.insert(0, ("states of this process", "dtype", "device", "elements", "MiB"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(text.rjust(width) if at > 2 else text.ljust(width) for at, (text, width) in enumerate(both))
            for both in (list(zip(row, widths, strict=True)) for row in rows)
        )
        return "\n".join(line.rstrip() for line in lines)


def attach(engine: CoreEngine) -> None:
    """Arrange what the settings of rank 0 ask to be printed (``dump_state``, ``steps_per_print``)."""
    if engine.settings.dump_state:
        say(f"configuration of the engine:\n{json.dumps(engine.settings.resolved, indent=2)}")
    every = engine.settings.steps_per_print
    if every is not None and math.isfinite(every):
        throughput = engine.settings.timers.throughput.enabled
        tokens = None
        if throughput:
            from ds_hf.engine.observe.model_flops import Tokens

            engine.events.add(tokens := Tokens(engine))
        engine.step_hooks.append(_Progress(max(int(every), 1), throughput, tokens))


def introduce(engine: CoreEngine) -> None:
    """The line with which a run begins, on rank 0. transformers' own tests look for the words "DeepSpeed info"."""
    if asked := engine.settings.ds_hf.summary:
        summary = summary_of(engine, states=asked == "full")
        announce(f"{summary}\n{summary.table()}" if summary.states else str(summary))
    if not logger.isEnabledFor(logging.INFO):
        return
    rows = (("parameters", engine.plan.parameters), ("gradients", engine.plan.gradients))
    placed = ", ".join(
        f"{name} {row.placement.value}" for name, row in (*rows, ("optimizer states", engine.plan.optimizer))
    )
    logger.info("DeepSpeed info: %d units, %s", len(engine.units), placed)
    logger.info("precision: %s", ", ".join(f"{row} {dtypes}" for row, dtypes in precisions(engine).items()))


def summary_of(engine: CoreEngine, *, states: bool = True) -> EngineSummary:
    """What ``engine`` is now; with a table of its ``states`` or without."""
    cuda = engine.device.type == "cuda"
    shape, buffers = engine.mesh.shape, [buffer for unit in engine.units for buffer in unit.buffers]
    return EngineSummary(
        version=own_version(),
        stage=engine.settings.zero_optimization.stage,
        mesh=str(shape),
        processes=engine.mesh.world.world_size,
        device=torch.cuda.get_device_name(engine.device) if cuda else engine.device.type.upper(),
        precision=precisions(engine),
        parameters=sum(unit.numel for unit in engine.units) + sum(p.numel() for p in _elsewhere(engine)),
        trained=sum(slot.numel for buffer in buffers if not buffer.frozen for slot in buffer.layout.slots),
        divided=max(shape.tensor, shape.pipe, shape.expert) > 1,
        optimizer=None if engine.optimizer is None else type(engine.optimizer.optimizer).__name__,
        kernels=_kernels(engine),
        micro=engine.batch.micro,
        accumulation=engine.accumulation.steps,
        data=shape.data,
        batch=engine.batch.train,
        notes=tuple(_notes(engine)),
        states=tuple(states_of(engine)) if states else (),
    )


def _elsewhere(engine: CoreEngine) -> Iterator[torch.Tensor]:
    """Parameters in no flat buffer: those in few bits."""
    return (param for param in engine.module.parameters() if home_of(param) is None)


def _kernels(engine: CoreEngine) -> str:
    optimizer = engine.optimizer
    if optimizer is None:
        return ""
    inner = optimizer.optimizer
    if not isinstance(inner, TensorwiseOptimizer) and streamed_update(inner) is None:
        return "its own step()"
    device = optimizer.store.device
    _, reason = choose(device, {optimizer.master_dtype(buffer) for buffer in optimizer.masters})
    where = {"cuda": "CUDA", "cpu": "C++"}.get(device.type, device.type)
    return f"plain torch ({reason})" if reason else f"ds_hf's {where} kernels"


def _notes(engine: CoreEngine) -> Iterator[str]:
    """What is so of each, asked of the part that does it: that it was asked for is not enough."""
    plan = engine.plan
    for name, row in (("optimizer states", plan.optimizer), ("parameters", plan.parameters)):
        if row.device != "device" and (engine.optimizer is not None or row is plan.parameters):
            yield f"{name} on {row.device}"
    buffers = (buffer for unit in engine.units for buffer in unit.buffers if buffer.sharded)
    inside = [buffer.replicas.over(plan.parameters.over) for buffer in buffers]
    sent = {
        "gradients": (plan.gradients, [gradient.buffer.axis for gradient in engine.reducer.buffers]),
        "parameters": (plan.parameters, inside),
    }
    for name, (row, axes) in sent.items():
        if row.bits and any(axis.world_size > 1 for axis in axes):
            yield f"{name} sent in {row.bits} bits"
    if plan.autocast:
        yield f"autocast to {plan.autocast}"
    if any(True for _ in _elsewhere(engine)):
        yield "some weights in few bits"
    if engine.mesh.shape.expert > 1:
        yield f"experts divided by {engine.mesh.shape.expert}"
    if plan.inner is not None:
        once_more = plan.parameters.over != plan.optimizer.over  # hpZ: states are divided over all
        what = "parameters divided once more" if once_more else "states divided"
        yield f"{what} within groups of {plan.inner}"
    parts = (*engine.hooks.handles, *engine.events.observers, vars(engine).get("compiler"))  # one may be both
    yield from filter(None, dict.fromkeys(getattr(part, "note", "") for part in parts))


def precisions(engine: CoreEngine) -> dict[str, str]:
    """In which dtype each row of the model states is kept, sent and summed; rows that there are not are left out."""
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    reduced = engine.reducer.buffers
    optimizer = engine.optimizer
    table: dict[str, Iterable[torch.dtype]] = {
        "parameters": (buffer.dtype for buffer in buffers if not buffer.frozen),
        "frozen parameters": (buffer.dtype for buffer in buffers if buffer.frozen),
        "gradients": (gradient.buffer.dtype for gradient in reduced),
        "reduced in": (gradient.dtype for gradient in reduced),
        "accumulated in": (gradient.policy.accumulation_dtype for gradient in reduced),
        "master weights": ()
        if engine.optimizer is None
        else map(engine.optimizer.master_dtype, engine.optimizer.masters),
        "moments": () if optimizer is None else optimizer.moment_dtypes,
        "buffers": (buffer.dtype for buffer in engine.module.buffers() if buffer.is_floating_point()),
    }
    named = {row: sorted({SHORT.get(dtype, str(dtype)) for dtype in dtypes}) for row, dtypes in table.items()}
    return {row: " and ".join(dtypes) for row, dtypes in named.items() if dtypes}


class _Progress:
    """A line every so many steps; with ``throughput`` it says how many samples and tokens a second were trained since
    the last, and which share of the matrix rate that is (MFU).

    The first step is not counted, for it compiles, allocates and records what later ones use.
    """

    def __init__(self, every: int, throughput: bool, tokens: Tokens | None = None) -> None:
        self._every, self._throughput, self._tokens = every, throughput, tokens
        self._samples, self._since = 0, 0.0

    def __call__(self, engine: CoreEngine) -> None:
        if self._since:
            self._samples += engine.step_samples
        elif self._throughput:
            engine.get_global_grad_norm()  # waits for the device
            self._since = time.perf_counter()
            if self._tokens is not None:
                self._tokens.drop()
        if engine.global_steps % self._every == 0:
            self._say(engine)

    def _say(self, engine: CoreEngine) -> None:
        norm = engine.get_global_grad_norm()  # now it is known whether the schedule stays advanced
        assert engine.optimizer is not None
        lr = ", ".join(f"{group['lr']:.3g}" for group in engine.optimizer.param_groups)
        line = (
            f"step {engine.global_steps}: lr [{lr}], grad norm {norm:.3g}, skipped {engine.skipped_steps}, "
            f"loss scale {engine.optimizer.loss_scaler.scale:g}"
        )
        if self._samples:
            now = time.perf_counter()
            line += f", {self._samples / (now - self._since):.4g} samples/s"
            if self._tokens is not None:
                line += self._tokens.said(now - self._since, self._samples)
            self._samples, self._since = 0, now
        say(line)
