"""The range test and the confirming runs on a live engine: its own forward, reduction, clipping and optimizer.

``search`` is a generator: it yields a ``Want`` and is sent the loss of that micro-batch, with a graph where it is to
train. Who computes the loss - the library from stored batches, or the user's own script - is the matter of ``feeding``
and ``script``. Before each sweep and run, and at the end whatever happens, the engine is put back to its start.

Every number that steers the search is a sum over the ranks, so all of them take the same way.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.engine.comm.collectives import all_reduce_max, all_reduce_sum
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.engine.observe.probes.snapshot import Snapshot
from ds_hf.errors import DsHfError, LossScaleError
from ds_hf.log import logger
from ds_hf.lr import (
    Decision,
    Landmarks,
    LrOptions,
    LrResult,
    PlannedRun,
    RunResult,
    Sweep,
    decide,
    landmarks,
    run_lr,
    so_far,
)
from ds_hf.lr.budget import planned, updates_of

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Deadline", "Fed", "Search", "Want", "search"]

Tell = Callable[[dict[str, Any]], None]
START = 8  # updates whose mean loss is that of the start
SMOOTH = 4  # updates whose mean loss is that of now
LEAST_FALL = 0.2  # of the first loss: counts as fallen at least
SETTLING = 40  # updates that fp16 may skip at first
_MORE = "--budget gives it more"
SKIPS = 8  # updates in a row that fp16 may skip before that counts as divergence


@dataclass(frozen=True)
class Want:
    """A micro-batch of which the loss is wanted.

    Attributes:
        batch: number of the batch, whose micro-batches make one update; ``held_out`` ones are counted by themselves.
        micro: which micro-batch of it.
        held_out: only the loss is wanted.
    """

    batch: int
    micro: int
    held_out: bool


@dataclass(frozen=True)
class Fed:
    """Its loss.

    Attributes:
        loss: with a graph.
        backward: further arguments of ``engine.backward``.
        share: of this loss in that of the whole batch, 1 / accumulation steps for a mean.
        evaluated: it was computed in eval mode without a graph.
    """

    loss: Tensor
    backward: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    evaluated: bool = False


Search = Generator[Want, Fed, LrResult]


@dataclass(frozen=True)
class Deadline:
    """When a search has to have its answer, on the clock ``now``; ``at`` infinity: never."""

    at: float = math.inf
    now: Callable[[], float] = time.time

    @property
    def left(self) -> float:
        """Seconds."""
        return self.at - self.now()

    def of_all(self, engine: CoreEngine, seconds: float) -> tuple[float, float]:
        """(the least of what is left, the most of ``seconds``) of all processes. Collective."""
        mine = torch.tensor([-self.left, seconds], dtype=torch.float64, device=compute_device())
        left, most = all_reduce_max(mine, engine.mesh.world, "the time that is left of a learning-rate test").tolist()
        return -left, most


class _TimeOver(Exception):
    """There is no time for another update, on all processes."""


def search(
    engine: CoreEngine, options: LrOptions, tell: Tell | None = None, deadline: Deadline | None = None
) -> Search:
    """Sweep, confirm, decide; the engine is bit for bit what it was when the generator ends or is closed.

    Args:
        tell: called with what just happened, for people who wait.
        deadline: the search is made short enough for it by the first updates, and ends with the best so far.

    Raises:
        DsHfError: the loss is not finite at the start, every rate diverges, or the engine could not be restored.
    """
    started = time.monotonic()
    work = _Work(engine, options, tell or (lambda event: None), deadline or Deadline())
    finished = False
    try:
        with _quiet(engine):
            try:
                result = yield from _search(work, started)
                finished = True
            finally:
                work.snapshot.restore()
    finally:
        wrong = work.snapshot.differences()
        if wrong and finished:
            raise DsHfError(f"the engine is not what it was before the learning-rate test: {', '.join(wrong[:10])}")
    return result


def _search(work: _Work, started: float) -> Search:
    sweeps: list[Sweep] = []
    while len(sweeps) < work.options.seeds and not work.over:
        try:
            sweep = yield from work.sweep(work.options.seed + len(sweeps))
        except _TimeOver:
            break
        if not (work.over and sweeps):  # half of one says less than those before
            sweeps.append(sweep)
    if not sweeps:
        raise DsHfError(f"time was over after {work.updates} updates, before the range test; {_MORE}")
    runs: list[RunResult] = []
    try:
        marks = landmarks(sweeps)
        if work.over and not marks.bounded and len(sweeps[0].lrs) < work.options.num_steps // 2:
            raise ValueError("training has not been seen to break, nor most rates tried")
        decision = None
        if work.options.confirm_steps and not work.over:
            decision = yield from _confirmed(work, marks, runs)
    except ValueError:
        if work.over:
            error = ValueError(f"time was over after {work.updates} updates, too few for a range test; {_MORE}")
        raise DsHfError(str(error)) from error
    if work.over:
        work.notes.append(f"time was over: this is the best so far; {_MORE}")
    inner = work.engine.optimizer.optimizer  # type: ignore[union-attr]
    return LrResult.of(
        marks,
        decision,
        sweeps=tuple(sweeps),
        runs=tuple(runs),
        optimizer=type(inner).__name__,
        cycles_momentum="betas" in inner.defaults,
        total_steps=work.options.total_steps,
        updates=work.updates,
        seconds=time.monotonic() - started,
        notes=tuple(work.notes),
    )


def _confirmed(work: _Work, marks: Landmarks, runs: list[RunResult]) -> Generator[Want, Fed, Decision | None]:
    """Short trainings, into ``runs``, and what they decide; the best of them where time is over."""
    options = work.options
    seeds = [options.seed + index for index in range(options.seeds)]
    asking = decide(marks, options.confirm_steps, seeds, options.total_steps)
    run = next(asking)
    while True:
        try:
            runs.append(RunResult(run, (yield from work.run(run))))
        except _TimeOver:
            return so_far(runs, options.total_steps)
        try:
            run = asking.send(runs[-1].loss)
        except StopIteration as end:
            decision: Decision = end.value
            return decision


class _Work:
    """What sweeps and runs share."""

    def __init__(self, engine: CoreEngine, options: LrOptions, tell: Tell, deadline: Deadline) -> None:
        self.engine, self.options, self.tell, self.deadline = engine, options, tell, deadline
        self.over = self.planned = False  # no time is left; it is known how much an update takes
        self.notes: list[str] = []
        self.seconds: list[float] = []  # of the updates
        self.snapshot = Snapshot(engine)
        assert engine.optimizer is not None
        self.optimizer = engine.optimizer
        self.micro_batches = engine.accumulation.steps
        self.updates = 0
        self.settled: dict[str, Any] | None = None  # the loss scaler's state once the scale fits
        self.ratios = _ratios(self.optimizer.param_groups)

    def sweep(self, seed: int) -> Generator[Want, Fed, Sweep]:
        """From the start through all learning rates, until the end or divergence."""
        order = self._begin(seed)
        yield from self._warm_up(order)
        self._plan()
        options = self.options
        columns: dict[str, list[float]] = {key: [] for key in ("lrs", "train", "held_out_lrs", "held_out", "norms")}
        watch = _Divergence(options.stop_factor)
        skipped = 0
        for step in range(options.num_steps):
            lr = options.sweep_lr(step)
            try:
                loss = yield from self._update(next(order), lr)
            except _TimeOver:
                break
            columns["lrs"].append(lr)
            columns["train"].append(loss)
            columns["norms"].append(self.optimizer.grad_norm() or 0.0)
            skipped += self.optimizer.overflow
            if step % options.held_out_every == 0 and math.isfinite(loss):
                columns["held_out_lrs"].append(lr)
                columns["held_out"].append((yield from self._held_out(-(-options.held_out_batches // 4))))
                watch.held_out(columns["held_out"][-1])
            self.tell(
                {"phase": "sweep", "seed": seed, "step": step + 1, "of": options.num_steps, "lr": lr, "loss": loss}
            )
            if watch.diverged(loss, self.optimizer.overflow):
                break
        if step == 0 and not self.over:
            raise DsHfError(f"the loss is {loss} before the first update of the range test: training cannot begin")
        ended = lr if watch.over else None
        rows = {key: tuple(values) for key, values in columns.items() if key != "norms"}
        return Sweep(seed, grad_norms=tuple(columns["norms"]), skipped=skipped, diverged_at=ended, **rows)

    def run(self, run: PlannedRun) -> Generator[Want, Fed, float]:
        """A short training; the held-out loss at its end, infinite when it diverged."""
        order = self._begin(run.seed)
        watch = _Divergence(self.options.stop_factor)
        for step in range(run.steps):
            loss = yield from self._update(next(order), run_lr(run, step))
            if watch.diverged(loss, self.optimizer.overflow):
                self.tell({"phase": "run", "lr": run.lr, "steps": run.steps, "seed": run.seed, "loss": None})
                return math.inf
        held_out = yield from self._held_out(self.options.held_out_batches)
        self.tell({"phase": "run", "lr": run.lr, "steps": run.steps, "seed": run.seed, "loss": held_out})
        return held_out if math.isfinite(held_out) else math.inf

    def _plan(self) -> None:
        """Once the first updates have shown what one takes: a search that ends in time."""
        if not math.isfinite(self.deadline.at) or len(self.seconds) < 2 or self.planned:
            return
        self.planned = True
        left, step = self.deadline.of_all(self.engine, statistics.median(self.seconds[1:]))
        asked, self.options = self.options, planned(self.options, left, step)
        if self.options != asked:
            self.notes.append(
                f"shorter, to be in time: sweeps of {self.options.num_steps} updates and runs of "
                f"{self.options.confirm_steps}, orders of the batches: {self.options.seeds}"
            )
        self.tell({"phase": "plan", "step_seconds": step, "updates": updates_of(self.options), "left": left,
                   "shorter": self.options != asked})  # fmt: skip

    def _warm_up(self, order: Iterator[int]) -> Generator[Want, Fed, None]:
        """Moments at the smallest rate, and on until fp16's scale fits, which later sweeps and runs begin with."""
        for _ in range(self.options.moment_steps):
            yield from self._update(next(order), self.options.min_lr)
        for _ in range(SETTLING if self.settled is None and self.optimizer.loss_scaler.dynamic else 0):
            if self.optimizer.overflow or not self.options.moment_steps:
                yield from self._update(next(order), self.options.min_lr)
            if not self.optimizer.overflow:
                break
        self.settled = self.settled or copy.deepcopy(self.optimizer.loss_scaler.state_dict())

    def _begin(self, seed: int) -> Iterator[int]:
        """Back to the start, with other random numbers; the order of the batches, without end."""
        self.snapshot.restore()
        if self.settled is not None:
            self.optimizer.loss_scaler.load_state_dict(copy.deepcopy(self.settled))
        _seed_everything(seed, self.engine.axis.rank)
        return _order(self.options.train_batches, seed)

    def _update(self, batch: int, lr: float) -> Generator[Want, Fed, float]:
        """One optimizer step; the loss before it.

        Raises:
            _TimeOver: on all processes, where one has no time for it.
        """
        engine, began = self.engine, self.deadline.now()
        if math.isfinite(self.deadline.at) and self.seconds:
            left, step = self.deadline.of_all(engine, max(self.seconds[-3:]))
            if left < step:
                self.over = True
                raise _TimeOver
        losses = []
        for micro in range(self.micro_batches):
            engine.train()
            fed = yield Want(batch, micro, held_out=False)
            losses.append(fed.loss.detach().float() * fed.share)
            engine.accumulation.forced = micro == self.micro_batches - 1
            engine.backward(fed.loss, **fed.backward)
            self._set_lr(lr)  # only now: a script that steps a schedule of its own has written its rate meanwhile
            with contextlib.suppress(LossScaleError):  # an overflow at the smallest scale: noticed as divergence
                engine.step()
        self.updates += 1
        mean = self._mean(losses)
        self.seconds.append(self.deadline.now() - began)
        return mean

    def _set_lr(self, lr: float) -> None:
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio

    def _held_out(self, count: int) -> Generator[Want, Fed, float]:
        """Mean loss of the first ``count`` batches set aside, in eval mode where the loss can be computed again."""
        engine, losses = self.engine, []
        states = torch.get_rng_state()
        for batch in range(count):
            for micro in range(self.micro_batches):
                engine.eval()
                fed = yield Want(batch, micro, held_out=True)
                losses.append(fed.loss.detach().float() * fed.share / count)
                if not fed.evaluated:  # its graph has to be used up: units wait for their backward
                    engine.backward(fed.loss, **fed.backward)
                    self.optimizer.reducer.clear()
        torch.set_rng_state(states)
        engine.train()
        return self._mean(losses)

    def _mean(self, losses: list[Tensor]) -> float:
        """Over the ranks."""
        axis = self.engine.axis
        total = torch.stack([loss.reshape(()) for loss in losses]).sum().to(compute_device(), torch.float64)
        return float(all_reduce_sum(total, axis, "the loss of a learning-rate test")) / axis.world_size


class _Divergence:
    """Whether the loss has left: not finite, or smoothed above its start by more than it had fallen and than noise."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.over = False
        self._train: list[float] = []
        self._held_out: list[float] = []
        self._skips = 0

    def diverged(self, loss: float, overflow: bool) -> bool:
        """Take note of one update."""
        self._skips = self._skips + 1 if overflow else 0
        self._train.append(loss)
        self._judge(self._train, START, SMOOTH)
        self.over = self.over or self._skips >= SKIPS
        return self.over

    def held_out(self, loss: float) -> None:
        """Take note of a look at the batches set aside, which are always the same."""
        self._held_out.append(loss)
        self._judge(self._held_out, 1, 1)

    def _judge(self, losses: list[float], start: int, smooth: int) -> None:
        if not math.isfinite(losses[-1]):
            self.over = True
        elif len(losses) > start:
            first = statistics.fmean(losses[:start])
            noise = statistics.stdev(losses[:start]) if start > 1 else 0.0
            least = min(statistics.fmean(losses[max(at - smooth, 0) : at]) for at in range(start, len(losses) + 1))
            fall = max(first - least, LEAST_FALL * abs(first))
            now = statistics.fmean(losses[-smooth:])
            self.over = self.over or now > first + self.factor * fall + 2 * noise


@contextlib.contextmanager
def _quiet(engine: CoreEngine) -> Iterator[None]:
    """Monitors are not told of the updates, and no schedule counts them."""
    engine.settle_step()  # the step before was the script's
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with engine.events.paused():
            yield
    finally:
        engine.lr_scheduler = scheduler
        logger.setLevel(level)


def _ratios(groups: list[dict[str, Any]]) -> list[float]:
    """Each group's rate over the largest: a user who gives the head ten times the rate of the rest keeps that."""
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    largest = max(rates)
    return [rate / largest if largest > 0 else 1.0 for rate in rates]


def _order(count: int, seed: int) -> Iterator[int]:
    """Numbers below ``count``, all of them once in another order, again and again; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _seed_everything(seed: int, rank: int) -> None:
    """Dropout differs between ranks, as in training."""
    torch.manual_seed(1_000_003 * seed + rank)
