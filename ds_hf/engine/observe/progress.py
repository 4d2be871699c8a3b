"""What an engine says of itself: a line when it is built, and those that ``steps_per_print`` asks for.

Rank 0 speaks. The first goes to the log, as information; what the user asked for goes to standard output. Nothing here
communicates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_hf.config.optimizer_traits import most_moments
from ds_hf.engine.checkpoint.describe import own_version
from ds_hf.engine.ops.library import choose
from ds_hf.engine.optim.base import TensorwiseOptimizer
from ds_hf.engine.optim.streaming import streamed_update
from ds_hf.engine.zero.buffer import home_of
from ds_hf.log import announce, logger, say
from ds_hf.measure.saving import being_measured

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine
    from ds_hf.engine.observe.model_flops import Tokens

__all__ = ["EngineSummary", "States", "attach", "precisions", "summary_of"]

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


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


@dataclass(frozen=True)
class EngineSummary:
    """What an engine is, as ``engine.summary()`` gives it; as a text it is the line with which a run begins.

    Attributes:
        version: of ds_hf. stage: of ZeRO. mesh: sizes of its axes, in words.
        processes, device: how many, and what each computes on.
        precision: dtypes of each row of the model states, see ``precisions``.
        parameters, trained: elements of the model, or of this process's part of a divided one, and how many train.
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
            f"{self.parameters:,} parameters{trained} in {dtypes}"
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
    """Announce ``engine`` and arrange what its settings ask to be printed (``dump_state``, ``steps_per_print``)."""
    if engine.mesh.world.rank != 0:
        return
    _announce(engine)
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


def _announce(engine: CoreEngine) -> None:
    """transformers' own tests look for the words "DeepSpeed info". The line is not for what is only measured."""
    asked = engine.settings.ds_hf.summary
    if asked and not being_measured():
        summary = summary_of(engine)
        announce(f"{summary}\n{summary.table()}" if asked == "full" else str(summary))
    rows = (("parameters", engine.plan.parameters), ("gradients", engine.plan.gradients))
    placed = ", ".join(
        f"{name} {row.placement.value}" for name, row in (*rows, ("optimizer states", engine.plan.optimizer))
    )
    logger.info("DeepSpeed info: %d units, %s", len(engine.units), placed)
    logger.info("precision: %s", ", ".join(f"{row} {dtypes}" for row, dtypes in precisions(engine).items()))


def summary_of(engine: CoreEngine) -> EngineSummary:
    """What ``engine`` is now."""
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
        optimizer=None if engine.optimizer is None else type(engine.optimizer.optimizer).__name__,
        kernels=_kernels(engine),
        micro=engine.batch.micro,
        accumulation=engine.accumulation.steps,
        data=shape.data,
        batch=engine.batch.train,
        notes=tuple(_notes(engine)),
        states=tuple(_states(engine)),
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
    plan, settings = engine.plan, engine.settings
    own = settings.ds_hf
    for name, row in (("optimizer states", plan.optimizer), ("parameters", plan.parameters)):
        if row.device != "device" and (engine.optimizer is not None or row is plan.parameters):
            yield f"{name} on {row.device}"
    for name, row in (("gradients", plan.gradients), ("parameters", plan.parameters)):
        if row.bits:
            yield f"{name} sent in {row.bits} bits"
    if plan.autocast:
        yield f"autocast to {plan.autocast}"
    if own.offload_activations or settings.activation_checkpointing.cpu_checkpointing:
        yield "activations in host memory"
    if any(True for _ in _elsewhere(engine)):
        yield "some weights in few bits"
    parts = {type(part).__name__ for part in (*engine.hooks.handles, *engine.events.observers)}
    for name, on in (
        ("blocks compiled", own.compile),
        ("blocks captured", own.capture),
        ("adapters computed together", "FusedAdapters" in parts),
        ("loss in chunks", own.chunked_loss is True or "ChunkedLoss" in parts),
        ("MLPs in tiles", own.tiled_mlp is not None),
        ("experts divided", settings.expert_parallel.enabled),
        ("products in fp8", own.fp8 is not None and own.fp8.enabled),
    ):
        if on:
            yield name


def _states(engine: CoreEngine) -> Iterator[States]:
    """Rows of the table, each of one dtype on one device."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, dtype, device, numel in _tensors(engine):
        key = name, _SHORT.get(dtype, str(dtype).removeprefix("torch.")), device
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
    for param in _elsewhere(engine):
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
    named = {row: sorted({_SHORT.get(dtype, str(dtype)) for dtype in dtypes}) for row, dtypes in table.items()}
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
