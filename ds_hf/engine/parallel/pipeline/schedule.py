"""Schedules of one batch: DeepSpeed's lists of instructions, and the order of work that the executor follows.

``steps()`` of a ``PipeSchedule`` yields DeepSpeed's instructions of each step, for programs that read them. What runs
is ``one_forward_one_backward`` or, where a stage has several chunks of the model, ``interleaved`` (Narayanan et al.
2021, arXiv 2104.04473) or ``dual_pipe_v`` (github.com/deepseek-ai/DualPipe): forward and backward of each micro-batch
in order, from which sends and receives follow.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "CommitP2P",
    "DataParallelSchedule",
    "DualPipeVSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
    "Work",
    "bubble",
    "dual_pipe_v",
    "in_flight",
    "interleaved",
    "one_forward_one_backward",
    "order_of",
]


class Work(NamedTuple):
    """Forward or backward of a micro-batch through one chunk of the stage."""

    forward: bool
    micro_batch: int
    chunk: int = 0


def one_forward_one_backward(micro_batches: int, stages: int, stage: int) -> list[Work]:
    """The 1F1B order: as many forwards as there are stages after this one, then one forward and one backward in turn.

    At most ``stages - stage`` micro-batches are in flight.
    """
    ahead = min(stages - stage - 1, micro_batches)
    order = [Work(True, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        order += [Work(True, ahead + index), Work(False, index)]
    return order + [Work(False, index) for index in range(micro_batches - ahead, micro_batches)]


def interleaved(micro_batches: int, stages: int, stage: int, chunks: int) -> list[Work]:
    """The interleaved 1F1B order of a stage that has ``chunks`` chunks of the model.

    Micro-batches go through in rounds of ``stages``: all of a round through the first chunk, then through the second.
    The idle share is that of 1F1B divided by ``chunks``.

    Args:
        micro_batches: a multiple of ``stages``.

    Raises:
        ValueError: it is not.
    """
    if chunks == 1:
        return one_forward_one_backward(micro_batches, stages, stage)
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are not a multiple of {stages} stages")
    total, round_ = micro_batches * chunks, stages * chunks

    def work(index: int, *, forward: bool) -> Work:
        chunk = index % round_ // stages
        return Work(forward, index // round_ * stages + index % stages, chunk if forward else chunks - 1 - chunk)

    ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    order = [work(index, forward=True) for index in range(ahead)]
    for index in range(total - ahead):
        order += [work(ahead + index, forward=True), work(index, forward=False)]
    return order + [work(index, forward=False) for index in range(total - ahead, total)]


def dual_pipe_v(micro_batches: int, stages: int, stage: int) -> list[Work]:
    """The order of DualPipeV, of a stage whose two chunks are the ends of a model that is folded in the middle.

    Micro-batches go down to the last stage through the first chunks and come back through the second ones. Backward of
    one chunk is not parted into that of inputs and that of weights, so the idle share is above that of the paper.

    Args:
        micro_batches: at least ``2 * stages``.

    Raises:
        ValueError: it is less.
    """
    return [work for together in _dual_pipe_v(micro_batches, stages, stage) for work in together]


def _dual_pipe_v(micro_batches: int, stages: int, stage: int) -> Iterator[tuple[Work, ...]]:
    """Pieces of work, each with what DualPipeV computes beside it."""
    if micro_batches < 2 * stages:
        raise ValueError(f"DualPipeV needs at least 2 * {stages} micro-batches, got {micro_batches}")
    begun = {(forward, chunk): itertools.count() for forward in (True, False) for chunk in (0, 1)}

    def forward(chunk: int) -> Work:
        return Work(True, next(begun[True, chunk]), chunk)

    def backward(chunk: int) -> Work:
        return Work(False, next(begun[False, chunk]), chunk)

    after, here = stages - 1 - stage, stage + 1
    for _ in range(2 * after):  # the pipeline fills on the way down,
        yield (forward(0),)
    for _ in range(here):  # and on the way back, until the first loss is there
        yield (forward(0),)
        yield (forward(1),)
    for _ in range(after):
        yield (backward(1),)
        yield (forward(1),)
    for _ in range(micro_batches - 2 * stages + here):
        yield forward(0), backward(1)
        yield forward(1), backward(0)
    for _ in range(after):  # no micro-batch is left for the way down,
        yield (backward(1),)
        yield forward(1), backward(0)
    for _ in range(here):  # nor for the way back
        yield (backward(1),)
        yield (backward(0),)
    for _ in range(after):
        yield (backward(0),)


def order_of(micro_batches: int, stages: int, stage: int, chunks: int = 1, *, folded: bool = False) -> list[Work]:
    """What a stage computes, one after another; ``folded`` as of ``StageModule``.

    Raises:
        ValueError: the schedule needs other micro-batches.
    """
    if folded and stages > 1:
        return dual_pipe_v(micro_batches, stages, stage)
    if folded:  # one stage goes through the whole model with each micro-batch
        ways = [(True, 0), (True, 1), (False, 1), (False, 0)]
        return [Work(forward, index, chunk) for index in range(micro_batches) for forward, chunk in ways]
    return interleaved(micro_batches, stages, stage, chunks)


def bubble(micro_batches: int, stages: int, chunks: int = 1, *, folded: bool = False) -> float:
    """The share of a batch in which a stage has to wait, where backward takes twice as long as forward."""
    idle = (stages - 1) * 3 / chunks
    if folded and stages > 1:
        idle = 2 * stages - 2.5
    return idle / (3 * micro_batches + idle)


def in_flight(micro_batches: int, stages: int, stage: int, chunks: int = 1, *, folded: bool = False) -> float:
    """Of how many micro-batches a stage keeps activations at once; of those in one of its chunks, that part."""
    order = order_of(micro_batches, stages, stage, chunks, folded=folded)
    return max(itertools.accumulate(1 if work.forward else -1 for work in order)) / chunks


# -- DeepSpeed's instructions -------------------------------------------------------------------------------------


class PipeInstruction:
    """One instruction; its keyword arguments are attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights and clear the gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients among the data-parallel processes of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied modules over their stages."""


class BufferOpInstruction(PipeInstruction):
    """Works on the pipeline buffer ``buffer_id``, in which a micro-batch is kept while it is in flight."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class CommitP2P(PipeInstruction):
    """Start the sends and receives since the last one of these, together, and wait for them."""


class LoadMicroBatch(BufferOpInstruction):
    """Take a micro-batch from the data."""


class ForwardPass(BufferOpInstruction):
    """Compute the outputs of the stage."""


class BackwardPass(BufferOpInstruction):
    """Compute gradients, and add those of the parameters up."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send gradients of the inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive gradients of the outputs from the next stage."""


# -- DeepSpeed's schedules ----------------------------------------------------------------------------------------


class PipeSchedule(ABC):
    """Yields the instructions of each step of one stage. Between two steps a barrier could stand.

    Args:
        micro_batches: of the batch.
        stages: of the pipeline.
        stage_id: the stage whose instructions these are.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """How many micro-batches are kept at once."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch: they take turns."""
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self._steps: Iterator[list[PipeInstruction]] | None = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)


class InferenceSchedule(PipeSchedule):
    """Forward of each micro-batch, stage after stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """At step ``t`` stage ``s`` computes micro-batch ``t - s``; even stages send before they receive."""
        for step in range(self.micro_batches + self.stages - 1):
            current = step - self.stage_id
            here, sent = self._valid_micro_batch(current), self._valid_micro_batch(current - 1)
            received_in, sent_from = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            found: list[PipeInstruction] = []
            if here and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(received_in))
            exchange: list[PipeInstruction] = []
            if sent and self._valid_stage(self.next_stage):
                exchange.append(SendActivation(sent_from))
            if here and self._valid_stage(self.prev_stage):
                exchange.append(RecvActivation(received_in))
            found += exchange if self.stage_id % 2 == 0 else exchange[::-1]
            if here:
                found.append(ForwardPass(received_in))
            yield found

    def num_pipe_buffers(self) -> int:
        """One that is received into, and one that is sent from."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: forwards and backwards take turns, on even and odd stages at different steps."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """``2 (micro_batches + stages - 1)`` steps, the last of which ends with the optimizer's."""
        total, before = 2 * (self.micro_batches + self.stages - 1), -1
        for step in range(total):
            current, is_forward = self._step_to_micro_batch(step)
            found = [*self._exchanges(current, before, is_forward=is_forward)]
            if self._valid_micro_batch(current):
                buffer = self._buffer_idx(current)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    found.append(LoadMicroBatch(buffer))
                found.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == total - 1:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = current
            yield found

    def _exchanges(self, current: int, before: int, *, is_forward: bool) -> Iterator[PipeInstruction]:
        """With the stage before in steps that compute a forward, with the next one in the others."""
        here, there = self._valid_micro_batch(current), self._valid_micro_batch(before)
        if is_forward and self._valid_stage(self.prev_stage):
            if there:
                yield SendGrad(self._buffer_idx(before))
            if here:
                yield RecvActivation(self._buffer_idx(current))
        elif not is_forward and self._valid_stage(self.next_stage):
            if here:
                yield RecvGrad(self._buffer_idx(current))
            if there:
                yield SendActivation(self._buffer_idx(before))

    def num_pipe_buffers(self) -> int:
        """Micro-batches in flight: the stages from here on, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The micro-batch of a step, which may be none of the batch, and whether its forward is computed.

        The forward of micro-batch ``m`` is at step ``2 m + stage``, its backward at ``2 (m + stages) - 1 - stage``.
        """
        if (step_id - self.stage_id) % 2 == 0:
            return (step_id - self.stage_id) // 2, True
        return (step_id + 1 + self.stage_id) // 2 - self.stages, False


class DualPipeVSchedule(PipeSchedule):
    """DualPipeV: a step is a forward, a backward or both, ``phase`` the chunk that computes it.

    Args:
        micro_batches: at least ``2 * stages``.
        forward_only: no backward, no gradients, no step of the optimizer.

    Raises:
        ValueError: too few micro-batches.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.forward_only = forward_only
        self._work = list(_dual_pipe_v(micro_batches, stages, stage_id))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """What is received for the work of a step, that work, and what is sent of it; last the optimizer's step."""
        for together in self._work:
            works = [work for work in together if work.forward or not self.forward_only]
            if works:
                received = [each for work in works for each in self._exchange(work, RecvActivation, RecvGrad)]
                sent = [each for work in works for each in self._exchange(work, SendActivation, SendGrad)]
                yield [*received, CommitP2P(), *(each for work in works for each in self._computing(work)), *sent]
        yield [CommitP2P()] if self.forward_only else [CommitP2P(), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _computing(self, work: Work) -> Iterator[PipeInstruction]:
        buffer = self._buffer_of(work)
        if work.forward and self.is_first_stage and work.chunk == 0:
            yield LoadMicroBatch(buffer)
        yield (ForwardPass if work.forward else BackwardPass)(buffer, phase=work.chunk)

    def _exchange(self, work: Work, activation: Any, gradient: Any) -> Iterator[PipeInstruction]:
        """With the stage that has the part before or after; none at the ends of the model and where it is folded."""
        first_end = (activation is RecvActivation) == (work.chunk == 0)
        if not work.forward:
            first_end = not first_end
        alone = self.is_first_stage if first_end else self.is_last_stage
        if not alone:
            yield (activation if work.forward else gradient)(self._buffer_of(work), phase=work.chunk)

    def num_pipe_buffers(self) -> int:
        """One of each micro-batch in each chunk."""
        return 2 * self.micro_batches

    def _buffer_of(self, work: Work) -> int:
        return work.chunk * self.micro_batches + work.micro_batch


class DataParallelSchedule(PipeSchedule):
    """Data parallelism with gradient accumulation, without stages."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """A micro-batch a step."""
        for index in range(self.micro_batches):
            found: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if index == self.micro_batches - 1:
                found += [ReduceGrads(), OptimizerStep()]
            yield found

    def num_pipe_buffers(self) -> int:
        """One is enough."""
        return 1
