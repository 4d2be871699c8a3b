"""Runs one batch through the stages: ``Executor``.

Invariants
- The order of work is that of ``schedule``; sends and receives follow from it, so no process waits for one that waits
  for it.
- Only the last stage scales a loss; gradients of other stages arrive scaled. Gradients are collected as in any backward
  of the engine, and reduced in the last one of the batch, but for those of tied modules, which the step reduces.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_hf.config.plan import StatePlan
from ds_hf.engine.accumulation import WholeBatches
from ds_hf.engine.casting import autocast_of, cast_floats
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Events, Phase
from ds_hf.engine.parallel.pipeline.messages import Links, Received
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.engine.parallel.pipeline.partition import part_of
from ds_hf.engine.parallel.pipeline.schedule import Work, order_of
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.errors import LossError, PipelineError
from ds_hf.log import logger

__all__ = ["BatchOutcome", "Executor"]


class Trained(Protocol):
    """The engine as the executor sees it."""

    mesh: Mesh
    plan: StatePlan
    device: torch.device
    compute_dtype: torch.dtype | None
    hooks: UnitHooks
    accumulation: WholeBatches
    events: Events

    def _scaled(self, loss: Tensor) -> Tensor: ...


@dataclass
class BatchOutcome:
    """What came out of a batch on this stage.

    Attributes:
        losses: of each micro-batch, or what the last layer gave without a loss; on the stage of the last layer alone.
        outputs: of the last micro-batch, before the loss; in evaluation alone.
        further: sums of the module's additional losses, by name.
    """

    losses: list[Any] = field(default_factory=list)
    outputs: Any = None
    further: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Kept:
    """What backward of a micro-batch needs of its forward."""

    received: Received | None
    outputs: list[Tensor]


class _Telling:
    """Reports of hangs say where this stage is, and so does what it raises. (A class: entered for every work.)"""

    def __init__(self, executor: Executor, work: Work) -> None:
        kind = "forward" if work.forward else "backward"
        chunk = f", chunk {work.chunk}" if executor.chunks > 1 else ""
        where = f"stage {executor.stage} of {executor.stages}"
        self.at = executor.links.log.at = f"{where}, {kind} of micro-batch {work.micro_batch}{chunk}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, *_: object) -> None:
        if not isinstance(error, Exception):
            return
        if sys.version_info >= (3, 11):
            error.add_note(f"ds_hf: in {self.at}")
        else:
            logger.error("%s: %s", self.at, error)


class _Computing:
    """The time inside is not idle; it is that of a phase of the engine."""

    def __init__(self, executor: Executor, phase: Phase, *outputs: Tensor) -> None:
        self.executor, self.phase = executor, executor.engine.events.phase(phase, *outputs)

    def __enter__(self) -> None:
        self.begun = time.perf_counter()
        self.phase.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.phase.__exit__(*error)
        self.executor.busy_seconds += time.perf_counter() - self.begun


class Executor:
    """Runs batches on this process's stage.

    Attributes:
        seconds: of the last batch, and how many of them were forwards and backwards.
    """

    def __init__(self, engine: Trained, module: StageModule) -> None:
        self.engine, self.module = engine, module
        mesh = engine.mesh
        self.stages, self.stage, self.chunks = mesh.shape.pipe, mesh.stage_rank, module.chunks
        self.folded = module.folded
        self.links = Links(mesh, engine.device, self.chunks, folded=self.folded)
        self.seconds = self.busy_seconds = 0.0
        self._kept: dict[tuple[int, int], _Kept] = {}

    @property
    def idle_share(self) -> float:
        """Which part of the last batch this stage neither computed a forward nor a backward."""
        return max(0.0, 1 - self.busy_seconds / self.seconds) if self.seconds else 0.0

    def train(self, items: Sequence[Any], micro_batches: int) -> BatchOutcome:
        """Forward and backward of all micro-batches.

        Args:
            items: ``(inputs, labels)`` of each, where this stage reads them.
        """
        order = order_of(micro_batches, self.stages, self.stage, self.chunks, folded=self.folded)
        accumulation = self.engine.accumulation
        with self._batch(), self.engine.events.phase("schedule"):
            outcome = BatchOutcome()
            for place, work in enumerate(order):
                accumulation.last = place == len(order) - 1
                try:
                    self._run(work, order[place + 1] if place + 1 < len(order) else None, items, outcome)
                finally:
                    accumulation.last = False
            self.links.settle()
        return outcome

    def evaluate(self, items: Sequence[Any], micro_batches: int, *, compute_loss: bool) -> BatchOutcome:
        """Forward of all micro-batches, in rounds of as many as there are stages."""
        rounds = [
            range(first, min(first + self.stages, micro_batches)) for first in range(0, micro_batches, self.stages)
        ]
        order = [Work(True, index, chunk) for each in rounds for chunk in range(self.chunks) for index in each]
        with self._batch(), torch.no_grad():
            outcome = BatchOutcome()
            for place, work in enumerate(order):
                following = order[place + 1] if place + 1 < len(order) else None
                with _Telling(self, work):
                    self._forward(work, following, items, outcome, compute_loss=compute_loss)
            self.links.settle()
        return outcome

    @contextmanager
    def _batch(self) -> Iterator[None]:
        self.engine.hooks.reset()
        self._kept.clear()
        self.busy_seconds, begun = 0.0, time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - begun
            self.module.chunk = 0
            self.links.log.at = ""

    def _run(self, work: Work, following: Work | None, items: Sequence[Any], outcome: BatchOutcome) -> None:
        with _Telling(self, work):
            if work.forward:
                self._forward(work, following, items, outcome, compute_loss=True)
            else:
                self._backward(work, following)

    # -- forward --------------------------------------------------------------------------------------------------

    def _part(self, work: Work) -> int:
        """Which of the consecutive parts of the model."""
        return part_of(self.stage, work.chunk, self.stages, folded=self.folded)

    def _is_last(self, work: Work) -> bool:
        return self._part(work) == self.stages * self.chunks - 1

    def _forward(
        self, work: Work, following: Work | None, items: Sequence[Any], outcome: BatchOutcome, *, compute_loss: bool
    ) -> None:
        received, inputs = None, None
        before = self.links.before[work.chunk]
        if before is None:
            inputs = self._inputs(items[work.micro_batch])
        else:
            received = before.receive()
            inputs = received.value
        self._expect(following)
        self.module.chunk = work.chunk
        with _Computing(self, "forward"):
            with autocast_of(self.engine.plan, self.engine.device):
                outputs = self.module(inputs)
            if self._is_last(work):
                outcome.outputs = None if torch.is_grad_enabled() else outputs
                outputs = self._loss(outputs, items, work, compute_loss=compute_loss)
                outcome.losses.append(_detached(outputs))
                for name, value in (self.module.get_additional_losses() or {}).items():
                    outcome.further[name] = outcome.further.get(name, 0) + value.detach()
        after = self.links.after[work.chunk]
        if after is not None:
            after.send(outputs)
        if torch.is_grad_enabled():
            kept = [t for t in _tensors(outputs) if t.requires_grad]
            self._kept[work.micro_batch, work.chunk] = _Kept(received, kept)

    def _inputs(self, item: Any) -> Any:
        inputs = _placed(_half(item, 0), self.engine.device)
        dtype = self.engine.compute_dtype
        return inputs if dtype is None else cast_floats(inputs, dtype)

    def _loss(self, outputs: Any, items: Sequence[Any], work: Work, *, compute_loss: bool) -> Any:
        if self.module.loss_fn is None or not compute_loss:
            return outputs
        labels = _placed(_half(items[work.micro_batch], 1), self.engine.device)
        return self.module.loss_fn(outputs, labels)

    # -- backward -------------------------------------------------------------------------------------------------

    def _backward(self, work: Work, following: Work | None) -> None:
        kept = self._kept.pop((work.micro_batch, work.chunk))
        link = self.links.gradients_after[work.chunk]
        gradients: list[Tensor | None] | None = None
        if link is not None:
            gradients = list(link.receive_gradients(kept.outputs))
        self._expect(following)
        with _Computing(self, "backward", *kept.outputs), self.engine.hooks.driving():
            if link is None:
                self._last_backward(kept.outputs)
            elif kept.outputs:
                torch.autograd.backward(kept.outputs, gradients)
        if kept.received is not None:
            back = self.links.gradients_before[work.chunk]
            assert back is not None
            back.send_gradients(kept.received.leaves)

    def _last_backward(self, outputs: list[Tensor]) -> None:
        if len(outputs) != 1 or outputs[0].numel() != 1:
            raise LossError(
                "the loss of a pipeline is one number with a graph behind it: give PipelineModule a loss_fn that "
                f"returns it, or a last layer that does (it gave {[tuple(out.shape) for out in outputs]})"
            )
        loss = outputs[0] / self.engine.accumulation.steps if self.engine.accumulation.steps > 1 else outputs[0]
        self.engine._scaled(loss).backward()  # type: ignore[no-untyped-call]

    def _expect(self, following: Work | None) -> None:
        """Announce what the next work receives first."""
        if following is None:
            return
        if following.forward:
            link = self.links.before[following.chunk]
            if link is not None:
                link.expect()
        elif (following.micro_batch, following.chunk) in self._kept:
            link = self.links.gradients_after[following.chunk]
            if link is not None:
                link.expect_gradients(self._kept[following.micro_batch, following.chunk].outputs)


def _half(item: Any, place: int) -> Any:
    """Inputs or labels of an item of the data."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise PipelineError(
            f"the data of a pipeline are pairs (inputs, labels), and this item is a {type(item).__name__}"
            f"{f' of {len(item)}' if isinstance(item, tuple | list | dict) else ''}: give set_batch_fn() a function "
            "that makes pairs of your batches"
        )
    return item[place]


def _placed(value: Any, device: torch.device) -> Any:
    """A copy of the tensors of a nest on ``device``; lists become tuples."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, tuple | list):
        return tuple(_placed(item, device) for item in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, tuple | list) else []


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return [_detached(item) for item in value] if isinstance(value, tuple | list) else value
