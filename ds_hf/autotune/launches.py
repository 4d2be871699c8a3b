"""How a search starts the user's script: folder, configuration, request and command of each launch.

What a launch measured is given as seconds of the machine as it was in the first one (``measure.machine``).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_hf.autotune.command import LENGTH, Command, found_program
from ds_hf.autotune.division import PIPE
from ds_hf.autotune.load import shares_gpu
from ds_hf.autotune.options import Metric, Options
from ds_hf.autotune.space import CHECKPOINTING, MICRO, WORKERS, Setting, can_follow, config_of, divides_as_given
from ds_hf.autotune.trial import Launch, LaunchOutcome, Point, Runner, Watch, launch_words, samplers
from ds_hf.config.types import Config
from ds_hf.measure.machine import NORMAL, Level, Slowdown, compared, error_of, levels_of
from ds_hf.measure.protocol import TrialRequest
from ds_hf.measure.statistics import summarise
from ds_hf.regular_files import replace_file

__all__ = ["NATURAL_STEPS", "Launches", "Problem", "Run"]

NATURAL_STEPS = 6
OWN_OVERTIME = 3.0  # times the budget: without the user's own file nothing is known, and a busy machine starts slowly
_OF_THE_GPUS = ("compute", "copy", "communication")  # probes of the GPUs, the last one of the links between them
LEAST_SECONDS = 30.0  # for a launch when the budget is nearly spent
UNTIMED_STEPS = 4  # replayed a size where bytes alone count
LONG_STEPS = 2  # the same of the longest sequences, which take long; of the script itself, one beside its warm-up

Run = Callable[[Launch, "Watch | None"], LaunchOutcome]


@dataclass(frozen=True)
class Problem:
    """What is tuned: the user's command and file, and how; ``processes`` on this host."""

    command: Command
    config: Config
    options: Options
    processes: int


class Launches:
    """Starts launches of one problem.

    Args:
        run: what really starts one; tests give another.
    """

    def __init__(self, problem: Problem, run: Run) -> None:
        self.problem, self.options, self.command, self.run = problem, problem.options, problem.command, run
        self.tree = problem.config.resolved
        self.started = time.monotonic()
        self._machine: dict[str, Level] = {}  # of the first launch
        self._there: Setting | None = None  # of processes that stay
        self._stays = True  # until an engine failed that was made in the place of another one
        self._weights: dict[str, float] = {}
        self._fed: dict[str, Any] = {}  # samples and elements of the user's own micro-batch
        self._own_micro = 0
        self.follows_no_file = ""  # why the script's micro-batches stay, whatever its file says; empty: not known to
        self._steady = False  # whether this search has the GPUs to itself
        self._unshared: tuple[str, ...] = _OF_THE_GPUS  # probes that say nothing of the machine then

    def refer(self, events: Mapping[str, Any]) -> None:
        """Compare with the launch that said this."""
        self._machine = levels_of(events.get("machine")) or levels_of(events.get("machine natural"))
        facts = events.get("facts") or {}
        self._fed, self._own_micro = events.get("fed") or {}, facts.get("micro") or 0
        alone = facts.get("on_host") == facts.get("processes")  # a network has other users
        self._unshared = _OF_THE_GPUS if alone else _OF_THE_GPUS[:2]
        self._steady = bool(facts.get("cuda")) and not shares_gpu(events.get("load") or {})
        split = events.get("split") or {}
        if "compute" in split:
            half, others = float(split["compute"]) / 2, (float(split["communication"]), float(split["idle"]))
            self._weights = dict(zip(("compute", "copy", "communication", "host"), (half, half, *others), strict=True))

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.options.budget - (time.monotonic() - self.started)

    @property
    def seeks_length(self) -> bool:
        """Whether the longest sequences are wanted."""
        return self.options.metric is Metric.LENGTH

    def own(self, watch: Watch) -> LaunchOutcome:
        """The user's command with the user's values; the engine alone knows yet which batch that is."""
        name = "0000-own"
        config = self._write_config(name, config_of(self.tree, {}))
        high = 0 if divides_as_given(self.options) else self.options.high_micro  # 0: the user's own size alone
        request = self._request(name, survey=True, own_axis=True, natural_steps=NATURAL_STEPS,
                                low_micro=self.options.low_micro, high_micro=high,
                                length=0 if self.seeks_length else None, config=str(config),
                                further=1)  # fmt: skip
        outcome = self._launch(name, self.command.words(config), request, watch, overtime=OWN_OVERTIME)
        facts = outcome.events.get("facts", {})
        if facts and facts["micro"] in outcome.too_large:  # its own steps may have crossed a limit that nothing keeps
            outcome.natural, outcome.waits = [], []
            outcome.kind, outcome.reason = "oom", f"out of memory at micro-batch {facts['micro']}"
        if not outcome.points and facts:
            _from_natural(outcome, facts["micro"], facts["accumulation"])
        self.refer(outcome.events)
        return self._compare(outcome)

    def replayed(
        self,
        name: str,
        setting: Setting,
        sizes: list[tuple[int, int]],
        best: float | None,
        watch: Watch,
        *,
        longest: bool = True,
        data: int | None = None,
        length: int | None = None,
    ) -> LaunchOutcome:
        """All sizes of a setting in one launch, which resizes the script's batch.

        Args:
            best: seconds a sample of one process so far. longest: look for the longest samples, which takes time.
            data: processes that read different samples, where those are not as many as the user's batch is for.
            length: the longest sequences are wanted, and this long ones are expected to fit.
        """
        tree, values = config_of(self.tree, setting), {}
        if data is not None:
            tree, values = self.final_config(setting, sizes[0], data), _batch_of(sizes[0])
        config = self._write_config(name, tree)
        request = self._request(name, points=tuple(sizes), gradient_checkpointing=setting.get(CHECKPOINTING), best=best,
                                machine={kind: level.seconds for kind, level in self._machine.items()},
                                longest=longest, config=str(config), length=length,
                                further=int(self._stays and data is None))  # fmt: skip
        goes_on = self.goes_on(setting)
        words = self.command.words(config, values)
        outcome = self._launch(name, words, request, watch, goes_on=goes_on)
        ended = outcome.kind == "timeout" and self.left <= 0  # with the budget
        if goes_on and outcome.kind != "ok" and not ended:  # what the engine before has left? Once more from the start
            self._stays = outcome.kind == "oom"
            spent, request = outcome.seconds, replace(request, further=int(self._stays))
            outcome = self._launch(name, words, request, watch)
            outcome.seconds += spent
        outcome.events["launch"] = {"goes_on": goes_on}
        self.note(setting, outcome)
        return self._compare(outcome)

    def note(self, setting: Setting, outcome: LaunchOutcome) -> None:
        """The processes of ``outcome`` stay, where they could, for what stands beside ``setting``."""
        self._there = setting if self._stays and outcome.stays else None

    def goes_on(self, setting: Setting) -> bool:
        """Whether the processes of the launch before can measure it."""
        return self._there is not None and can_follow(self._there, setting)

    def close(self) -> None:
        """End the processes that stay."""
        self._there = None
        if isinstance(self.run, Runner):
            self.run.close()

    def natural(
        self,
        name: str,
        setting: Setting,
        size: tuple[int, int],
        data: int,
        *,
        workers: int | None = None,
        replay: bool = False,
        length: int | None = None,
    ) -> LaunchOutcome:
        """The script as the user would start it with the result; its own steps become the point.

        Args:
            data: processes that read different samples.
            workers: of the script's DataLoader; ``None``: as the script has it.
            replay: the engine replays the size first, which becomes the point.
            length: tokens of a sequence, which the script is told, and the engine replays.
        """
        name, values = self.unused(name), _batch_of(size)
        values |= {key: setting[key] for key in (CHECKPOINTING, PIPE) if key in setting}
        if workers is not None:
            values[WORKERS] = workers
        if length is not None:
            values[LENGTH] = length
        config = self._write_config(name, self.final_config(setting, size, data))
        points = (size,) if replay else ()
        request = self._request(name, natural_steps=NATURAL_STEPS if length is None else LONG_STEPS - 1, points=points,
                                longest=False, length=length, exactly=length is not None)  # fmt: skip
        outcome = self._launch(name, self.command.words(config, values), request, None)
        made = outcome.events.get("facts", {}).get("pipe")
        if PIPE in setting and made not in (None, setting[PIPE]):
            reason = f"the script made {made} stages where {setting[PIPE]} were asked for"
            return LaunchOutcome("crash", f"{reason}: it does not follow {self.command.mappings.get(PIPE, 'its file')}")
        if self._stayed(outcome.events.get("fed"), size[0]):
            self.follows_no_file = (
                f"the script's micro-batches stay as they were ({self._fed['samples']} samples) where its file says "
                f"{size[0]}, which trains with another global batch: its loader has to take "
                f"engine.train_micro_batch_size_per_gpu(), or --fix {MICRO}"
            )
            return LaunchOutcome("crash", self.follows_no_file, seconds=outcome.seconds)
        return self._compare(_from_natural(outcome, *size))

    def _stayed(self, fed: dict[str, Any] | None, micro: int) -> bool:
        """Whether the script fed as much as with the user's file. Samples may be packed into one row, which grows."""
        if not fed or not self._fed or micro == self._own_micro or fed["samples"] != self._fed["samples"]:
            return False
        grown = abs(math.log(fed["elements"] / self._fed["elements"]))
        return grown < abs(math.log(micro / self._own_micro)) / 2

    def each_natural(self, name: str, setting: Setting, sizes: list[tuple[int, int]], data: int) -> LaunchOutcome:
        """One launch a size, where the engine cannot resize the script's batch."""
        total = LaunchOutcome("oom")
        for size in sizes:
            part = self.natural(f"{name}-{size[0]}", setting, size, data)
            total.seconds += part.seconds
            total.points += part.points
            if part.kind == "oom":
                total.too_large.append(size[0])
            if part.kind == "ok" or not total.points:
                total.kind, total.reason, total.tail = part.kind, part.reason, part.tail
        return total

    def final_config(self, setting: Setting, size: tuple[int, int], data: int) -> dict[str, Any]:
        """The configuration of a setting with its batch written out, for ``data`` processes that read samples."""
        return {**config_of(self.tree, setting), **_batch_of(size), "train_batch_size": size[0] * size[1] * data}

    def _compare(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Its times at the speed that the machine had in the first launch."""
        events = outcome.events
        replayed, natural = levels_of(events.get("machine")), levels_of(events.get("machine natural"))
        steady = self._steady and not shares_gpu(events.get("load") or {})
        change = self._slowdown(replayed or natural, steady=steady)
        beside = self._slowdown(natural, steady=steady) if natural else change
        outcome.points = [_at(point, change) for point in outcome.points]
        if outcome.natural:
            found = summarise(outcome.natural)
            outcome.natural_error = math.hypot(beside.error, error_of(found.median, found.low, found.high))
            outcome.natural = [seconds / beside.factor for seconds in outcome.natural]
            outcome.waits = [seconds / beside.factor for seconds in outcome.waits]
        return outcome

    def _slowdown(self, here: dict[str, Level], *, steady: bool) -> Slowdown:
        """
        Args:
            steady: a GPU's clock follows what it computes: the more a setting asks of it, the slower are the probes
                beside its steps. And a small collective waits for the process that starts it last: it took 0.13 to 0.31
                ms on two H200. So if the search has the GPUs to itself, their probes say nothing of the machine.
        """
        if here == self._machine:
            return Slowdown()
        same = {kind: Level(1.0) for kind in self._unshared if kind in here} if steady else {}
        return compared(here | same, self._machine | same, self._weights)

    def _request(self, name: str, **asked: Any) -> TrialRequest:
        options = self.options
        return TrialRequest(
            events=str((self._folder(name) / "events.jsonl").resolve()),
            memory_limit=options.memory_limit,
            largest=options.metric is Metric.BATCH,
            steps=options.steps if options.metric.is_timed else LONG_STEPS if self.seeks_length else UNTIMED_STEPS,
            point_seconds=min(options.point_seconds, max(2.0, options.budget / 60)),
            **asked,
        )

    def _launch(
        self,
        name: str,
        words: list[str],
        request: TrialRequest,
        watch: Watch | None,
        overtime: float = 1.0,
        *,
        goes_on: bool = False,
    ) -> LaunchOutcome:
        options, self._there = self.options, None
        whole = launch_words(found_program(options.launcher), self.problem.processes, words)
        timeout = min(options.trial_timeout, overtime * max(LEAST_SECONDS, self.left))
        return self.run(Launch(whole, self._folder(name), request, timeout, options.stall_timeout, goes_on), watch)

    def unused(self, name: str) -> str:
        """``name``, with a number behind it where there is a launch of that name: another worker's, or one of this
        search's before it went on. Its folder is made."""
        for number in itertools.count(1):
            found = name if number == 1 else f"{name}.{number}"
            with suppress(FileExistsError):
                self._folder(found).mkdir(parents=True)
                return found
        raise AssertionError("unreachable")

    def _folder(self, name: str) -> Path:
        return self.options.results_dir / "trials" / name

    def _write_config(self, name: str, tree: dict[str, Any]) -> Path:
        folder = self._folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / "ds_config.json").resolve()
        replace_file(path, json.dumps(tree, indent=2) + "\n")
        return path


def _batch_of(size: tuple[int, int]) -> dict[str, Any]:
    return dict(zip(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), size, strict=True))


def _at(point: Point, change: Slowdown) -> Point:
    """A point at the reference's speed; its interval holds what the comparison leaves open."""
    error = math.hypot(change.error, error_of(point.seconds, point.low, point.high))
    seconds, reach = point.seconds / change.factor, math.exp(NORMAL * error)
    return dataclasses.replace(
        point,
        seconds=seconds,
        low=seconds / reach,
        high=seconds * reach,
        optimizer_seconds=point.optimizer_seconds / change.factor,
        slowdown=change.factor,
        error=error,
    )


def _from_natural(outcome: LaunchOutcome, micro: int, accumulation: int) -> LaunchOutcome:
    """The script's own steps as a point."""
    if outcome.natural and not outcome.points:
        found = summarise(outcome.natural)
        peak = int(outcome.events.get("peak", {}).get("nbytes", 0))
        data = samplers(outcome.events.get("facts", {}))
        point = Point(micro, accumulation, found.median, found.low, found.high, peak, 0.0, found.steps, data=data)
        outcome.points.append(point)
    return outcome
