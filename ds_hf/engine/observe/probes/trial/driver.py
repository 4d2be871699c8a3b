"""What happens when in a trial, as long as the script believes that it trains.

At the script's first training forward its batch is taken and every point of the request is replayed; then the script
goes on, ``natural_steps`` of its own steps are timed, and the process ends (or the state comes back, and it trains; or
it waits in its next forward for further requests).
The script never comes to save anything: where its training is shorter than that, or it writes a checkpoint meanwhile,
the process ends there with the steps that there were. It intercepts the engine's calls (``Events.intercept``), and a
step hook counts steps.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.events import Phase
from ds_hf.engine.observe.probes.snapshot import Snapshot
from ds_hf.engine.observe.probes.trial.alone import PipelineLoss, is_made_of, takes_statistics
from ds_hf.engine.observe.probes.trial.batches import Batch, LoaderWatch, batch_numel, longest_batch, tensors_in
from ds_hf.engine.observe.probes.trial.clock import Clock
from ds_hf.engine.observe.probes.trial.further import follow
from ds_hf.engine.observe.probes.trial.lengths import length_event
from ds_hf.engine.observe.probes.trial.memory import agree_max, memory_meter, room_for_snapshot
from ds_hf.engine.observe.probes.trial.probe import Probe
from ds_hf.engine.observe.probes.trial.replay import NoLoss, NotResizable, Replay, loss_in
from ds_hf.engine.observe.probes.trial.split import split_of
from ds_hf.engine.observe.probes.trial.survey import facts, set_checkpointing, survey, survey_pipeline, tokens_in
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.errors import ConfigError
from ds_hf.log import logger
from ds_hf.measure.protocol import TRIAL_ENV, TrialRequest
from ds_hf.measure.saving import SaveGuard, leave

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Driver", "attach"]

_DRIVERS: weakref.WeakSet[Driver] = weakref.WeakSet()  # of scripts that end with their trials
NATURAL_BEATS = 12  # of the probes before and after the script's own steps
NATURAL_ERROR = 0.02  # of such a pair of readings at least, in its logarithm
LONGEST_NUMEL = 32  # samples looked up for the memory check; more are repeated


def attach(engine: CoreEngine, request: str | Path | TrialRequest | None = None) -> Driver | None:
    """Make ``engine`` measure what the request asks for, by default the environment's. Engines without an optimizer do
    not."""
    request = request or os.environ.get(TRIAL_ENV)
    if engine.optimizer is None or not request:
        return None
    given = request if isinstance(request, TrialRequest) else TrialRequest.read(request)
    return Driver(engine, given)


class Driver:
    """One engine's trial.

    Attributes:
        measured: the replay is over, or was found impossible; replayed: it was possible.
        timed: the script's own steps are over, and its next forward waits for further requests.
        done: everything asked for is measured.
    """

    def __init__(self, engine: CoreEngine, request: TrialRequest) -> None:
        self.engine, self.request = engine, request
        self.measured = self.replayed = self.timed = self.done = False
        self._own_loss: Tensor | None = None  # of the script's first step, which shows whether it trains with it
        self._in_eval_mode = False  # it trains so: ``from_pretrained`` leaves models in it
        self._file: TextIO | None = None
        if engine.mesh.world.rank == 0:
            try:
                self._file = Path(request.events).open("a", encoding="utf-8")  # noqa: SIM115  # until the process ends
            except (OSError, ValueError) as error:
                raise ConfigError(f"{TRIAL_ENV}: its file of events cannot be written to: {error}") from error
        self.meter = memory_meter(engine, request.memory_limit)
        self.loaders = LoaderWatch()
        if request.gradient_checkpointing is not None and not set_checkpointing(engine, request.gradient_checkpointing):
            self.emit("note", text="the model has no gradient checkpointing to switch on")
        engine.events.intercept(self)
        engine.step_hooks.append(self.after_step)
        self._clock = Clock(engine.device)
        self._waits: list[float] = []  # for data, since the step before
        self._waited = 0.0
        self._machine: dict[str, float] = {}  # before the script's own steps
        if request.finish:
            _DRIVERS.add(self)
            self._guard = SaveGuard(self._before_saving)
            atexit.register(self._ended_early, None)
        self._fed: list[Tensor] = []  # of the first stage of a pipeline
        if isinstance(engine.module, StageModule):
            engine.module.register_forward_pre_hook(self._feed)
            self._pipeline_loss = PipelineLoss(engine.module)
        self.emit("facts", **facts(engine, self.meter.total))

    def _feed(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not self._fed:
            self._fed += tokens_in(args)

    def emit(self, event: str, **fields: Any) -> None:
        """Append an event; rank 0 only."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
            self._file.flush()

    def call(self, name: Phase, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first forward that trains is where everything is measured; a pipeline has none, but steps."""
        if name == "step" and not self.measured and isinstance(self.engine.module, StageModule):
            self._lead_pipeline()
        trains = name == "forward" and torch.is_grad_enabled() and (self.engine.module.training or self._in_eval_mode)
        if trains and not self.measured:
            self.measured = True
            if self.request.finish:
                self._guard.watch_files()
            if others := [each for each in _DRIVERS if each is not self and not each.engine.destroyed]:
                self._lead(others)
            else:
                self.measure(args, dict(kwargs))
            if self.request.natural_steps:
                self._machine = Probe(self.engine).read(least=NATURAL_BEATS)
            elif self.request.further:
                self._stay(args, kwargs)
            else:
                self._finish()
            self._clock.mark()
            self._waited = self.loaders.waited
        elif trains and self.timed:
            self._stay(args, kwargs)
        elif name in ("backward", "step") and not self.engine.module.training:
            self._in_eval_mode = True
        if name == "backward" and self._own_loss is not None:
            self._look_at(args[0] if args else kwargs.get("loss"), self._own_loss)
        result = method(*args, **kwargs)
        if trains and self.replayed and self.request.survey and not self._waits:
            with suppress(NoLoss):
                self._own_loss = loss_in(result)
        return result

    def _look_at(self, loss: Any, own: Tensor) -> None:
        """Sizes were replayed with the model's own loss: whether the script trains with that one."""
        self._own_loss = None
        if isinstance(loss, Tensor) and not is_made_of(loss, own):
            why = "the script trains with a loss that is not the model's, of which nothing is known"
            self.emit("together", why=why)

    def _stay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        """Wait for further requests, and measure them on this batch."""
        self.say_done(stays=True)
        follow(self.engine, self.request, partial(self._hand_over, args, dict(kwargs)))

    def _lead_pipeline(self) -> None:
        """A pipeline runs its batches itself: the script's own steps are timed, from the second one on."""
        self.measured = True
        if self.request.finish:
            self._guard.watch_files()
        self.emit("note", text="a pipeline runs its batches itself, so only the script's own steps are timed",
                  resizable=False)  # fmt: skip
        if self.request.survey:
            if why := self._pipeline_loss.why_not_alone():
                self.emit("together", why=why)
            survey_pipeline(self.engine, self._fed, self.emit)
        if self.request.natural_steps == 0:
            self._finish()
        self._machine = Probe(self.engine).read(least=NATURAL_BEATS)
        self._clock.mark()
        self._waited = self.loaders.waited

    def _lead(self, others: list[Driver]) -> None:
        """One of several engines tells nothing of a step of the script: its own steps are timed, by this one."""
        self.emit("note", text=f"the script trains {len(others) + 1} engines, so only its own steps are timed",
                  resizable=False)  # fmt: skip
        for each in others:
            each.measured = each.done = True
            each.engine.events.intercept(None)

    def _hand_over(self, args: tuple[Any, ...], kwargs: dict[str, Any], engine: CoreEngine) -> None:
        """Another engine of the same script measures its request on the batch of this one."""
        driver = engine.events.interceptor
        assert isinstance(driver, Driver)
        driver.loaders = self.loaders
        driver.measure(args, kwargs)
        driver.say_done(stays=bool(driver.request.further))

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replay every point of the request on this batch."""
        self.measured = True
        numel = batch_numel(args, kwargs)
        if numel is not None:
            self.emit("fed", samples=numel, elements=max(each.numel() for each in tensors_in(*args, kwargs)))
        points = self._points()  # before a replay changes the engine's batch sizes
        if not points or numel is None:
            if numel is None:
                self.emit("note", text="the batch has no tensors, so it cannot be resized", resizable=False)
            return
        if self.request.gradient_checkpointing is not None:  # the script may have set it after it made the engine
            set_checkpointing(self.engine, self.request.gradient_checkpointing)
        if self.request.survey and (why := takes_statistics(self.engine.module)):
            self.emit("together", why=why)
        keep = None
        ends = self.request.finish and not self.request.natural_steps  # the state would not be seen again
        if not self.request.finish or (not ends and room_for_snapshot(self.engine)):
            keep = Snapshot(self.engine, gradients=True)
        replay = Replay(self.engine, Batch(args, kwargs, numel), self.request, self.meter, self.emit)
        try:
            with replay.prepared():
                self._replay(replay, points)
            self.replayed = True
        except (NoLoss, NotResizable) as error:
            replay.clean_up()
            self.emit("note", text=str(error), resizable=False)
        finally:
            if keep is not None:
                keep.restore()

    def _points(self) -> list[tuple[int, int]]:
        """What to measure: from the script's own batch outwards, larger ones first."""
        request, batch = self.request, self.engine.batch
        if not request.own_axis:
            return list(request.points)
        share = batch.micro * batch.accumulation_steps
        sizes = [m for m in range(1, share + 1) if share % m == 0 and request.low_micro <= m <= request.high_micro]
        larger = [micro for micro in sizes if micro > batch.micro]
        smaller = [micro for micro in sizes[::-1] if micro < batch.micro]
        if request.length is not None:  # the fewer samples, the longer ones
            larger, smaller = [], smaller[-1:]
        if request.largest:
            powers = (2**power for power in range(request.high_micro.bit_length()))
            larger += [micro for micro in powers if micro > share and micro >= request.low_micro]
        return [(micro, max(1, share // micro)) for micro in (batch.micro, *larger, *smaller)]

    def _replay(self, replay: Replay, points: list[tuple[int, int]]) -> None:
        if self.request.longest:
            self._find_longest(replay)
        if self.request.length is not None:
            known = length_event(self.engine, replay.longest)
            self.emit("length", **known)
            points = [] if "why" in known else points
        # The first step makes the moments, which later ones find: alone it says nothing of their memory. Nothing is
        # compiled for it: its size may be none of those that are measured.
        with torch.compiler.set_stance("force_eager"):
            replay.take_one()
        if self.request.survey:
            survey(replay, self.emit)
            if self.request.gradient_checkpointing is not None:
                set_checkpointing(self.engine, self.request.gradient_checkpointing)
        best = replay.measure_all(points)
        if best is not None:
            micro, accumulation = best
            shares = split_of(replay, replay.batch_of(best), accumulation)
            self.emit("split", micro=micro, accumulation=accumulation, **shares)

    def _find_longest(self, replay: Replay) -> None:
        """The longest samples, if that is possible on every rank."""
        found: Batch | str
        try:
            if self.engine.mesh.shape.sequence > 1:
                found = "several processes share each sequence, and the script divides it"
            else:
                found = longest_batch(self.loaders.loader, replay.batch, LONGEST_NUMEL)
        except Exception as error:  # the data set is the script's; any fault in it only costs the check
            found = f"{type(error).__name__}: {error}"
        flag = torch.tensor([isinstance(found, str)], dtype=torch.int32, device=self.engine.device)
        collectives.all_reduce_max(flag, self.engine.mesh.world, "whether the longest batch is known")
        self.emit("longest", known=not bool(flag))
        if isinstance(found, str):
            self.emit("note", text=f"memory was not checked with the longest batch: {found}")
        elif not bool(flag):
            replay.worst = found

    def after_step(self, engine: CoreEngine) -> None:
        """Step hook: times the script's own steps."""
        if not self.measured or self.timed or self.done or not self.request.natural_steps:
            return
        self._own_loss = None
        self._clock.mark()
        self._waits.append(self.loaders.waited - self._waited)
        self._waited = self.loaders.waited
        if len(self._waits) > self.request.natural_steps:  # the first one is warm-up
            self._report_natural()
            self._report_machine(Probe(engine).read(least=NATURAL_BEATS))
            self.timed = bool(self.request.further) and self.replayed
            if not self.timed:
                self._finish()

    def _report_natural(self) -> None:
        """The script's own steps so far; the first one is warm-up."""
        micro, accumulation = self.engine.batch.micro, self.engine.batch.accumulation_steps
        for seconds, wait in zip(self._clock.read()[1:], self._waits[1:], strict=False):
            self.emit("step", micro=micro, accumulation=accumulation, seconds=seconds, wait=wait, kind="natural")

    def _before_saving(self, what: str) -> None:
        """Nothing is saved: before anything is measured the script goes on without it, afterwards it ends."""
        if not self.measured:
            logger.warning("%s is left out: ds-hf autotune saves nothing", what)
            return
        self._ended_early(what)
        leave(0)

    def _ended_early(self, before: str | None) -> None:
        """The script's training is over, or it saves; each process comes here by itself, and no other is waited for."""
        if self.done:
            return
        self.done = True
        if self.timed:
            self.emit("done")
        elif self.measured:
            self._report_natural()
            where = "its end" if before is None else before
            self.emit(
                "note", text=f"{max(0, len(self._waits) - 1)} of the script's own steps were timed, before {where}"
            )
            self.emit("done")

    def _report_machine(self, after: dict[str, float]) -> None:
        """How fast it was beside the script's own steps, from readings before and after them."""
        levels, changes = {}, [0.0]
        for kind in self._machine.keys() & after.keys():
            change = math.log(after[kind] / self._machine[kind])
            changes.append(change)
            levels[kind] = (math.sqrt(after[kind] * self._machine[kind]), max(abs(change) / 2, NATURAL_ERROR))
        self.emit("machine", phase="natural", levels=levels, drift=math.exp(max(map(abs, changes))))

    def say_done(self, *, stays: bool = False) -> None:
        """Everything is measured; the process ends, or ``stays`` for the next request."""
        self.done = True
        peak = self.meter.peak()
        if isinstance(self.engine.module, StageModule):  # stages differ
            peak = agree_max(self.engine, peak, partial(_largest, self.engine))
        self.emit("peak", nbytes=peak)
        self.emit("done", stays=stays)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        """Say so, and end the process or leave the engine alone."""
        self.say_done()
        self.loaders.remove()
        if not self.request.finish:
            self.engine.events.intercept(None)
            return
        collectives.barrier(self.engine.mesh.world)
        with suppress(Exception):
            dist.destroy_process_group()
        leave(0)


def _largest(engine: CoreEngine, tensor: Tensor) -> None:
    collectives.all_reduce_max(tensor, engine.mesh.world, "a peak")
