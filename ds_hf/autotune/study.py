"""The search: the user's own file first, then settings in the order of the cost model and of Optuna's sampler.

Each launch is one Optuna trial in a journal file, so that a search that was killed goes on, and workers on several
machines share it. A launch takes the setting of which the corrected cost model expects most gain, by how fast it thinks
it is and how unsure it is of that; every fourth is Optuna's own choice, which does not believe the model. It ends when
the budget is spent, everything is tried, no launch that is left is worth its time, or ``patience`` brought no gain.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optuna

from ds_hf.autotune.cost import CostModel, Survey
from ds_hf.autotune.division import EXPERTS, HPZ, MICS, PIPE, SEQUENCE, TENSOR, division_of, sizes_of
from ds_hf.autotune.footprint import Footprint, TracedAhead
from ds_hf.autotune.journal import STARTUP, Journal
from ds_hf.autotune.launches import Launches, Problem, Run
from ds_hf.autotune.lengths import check_length
from ds_hf.autotune.options import Metric
from ds_hf.autotune.records import ROLE_OWN, Record, attributes_of, value_of
from ds_hf.autotune.space import (
    CHECKPOINTING,
    COMPILE,
    MICRO,
    Setting,
    Space,
    can_follow,
    config_of,
    divides_as_given,
    key_of,
    points,
    told_up_front,
)
from ds_hf.autotune.trial import LaunchOutcome, Point, Runner, last_error, samplers
from ds_hf.autotune.view import View, duration
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.host import has_gpu
from ds_hf.memory import UnpredictableError
from ds_hf.printable import counted

__all__ = ["LEAST_AGAIN", "Search", "TuneError", "why_not_divided"]

EXPLORE_EVERY = 4
WORTH = 0.015  # of the step: a launch of which less gain is expected is not made
CLOSE = 1.1  # sizes predicted within this of a setting's best are measured
TIGHT = 0.9  # of the memory
BLAME = 0.9  # of a failure is the setting's; the rest is chance
TRACE_SHARE = 0.05  # of the budget: to trace what no thread has
LENGTH_SHARE = 0.2  # the same for sequences of all lengths
LR_SHARE = 0.5  # of the budget, with ``lr``
FAILURES = 3  # times ``patience``
LEAST_AGAIN = 2  # launches that confirm: of the best and of the user's file
FIRST_SHARE = 0.6  # of the first launch, which measures more, is what another one takes
GOES_ON_SHARE = 0.5  # of a launch, where its processes are there, and compile
GOES_ON_COMPILED_SHARE = 0.25  # the same of what is not compiled, or was before
BYTES_DOUBT = 0.05  # of a predicted peak, as the standard deviation of its logarithm
TIE = 1e-6  # what a second a sample counts where samples at once do
MANY = 1 << 62  # tokens
SUGGESTIONS = 8  # of the sampler that may be known or illegal before the model decides


class TuneError(DsHfError):
    """The search cannot go on; ``tail`` is the output of the script that explains it."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


class Search:
    """One worker's part of a search.

    Args:
        run: starts a launch; tests give another one.

    Attributes:
        own: record of the user's file. model, space: known after ``begin``.
    """

    def __init__(self, problem: Problem, view: View, run: Run | None = None) -> None:
        self.problem, self.view = problem, view
        self.launches = Launches(problem, run or Runner())
        self.options, self.command = problem.options, problem.command
        self.journal = Journal(self.options)
        self.own: Record
        self.model: CostModel
        self.space: Space
        self.tokens = 0  # of the script's own sequences, where the longest are wanted
        self.why_stopped = ""
        self.how_bytes = "not predicted: nothing limits them"
        self._ahead = TracedAhead(self._to_trace)

    def close(self) -> None:
        """End what it has started."""
        self.launches.close()
        self._ahead.close()

    # -- the user's own file --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Measure the user's file, or find that another worker has; then model and space.

        Raises:
            TuneError: the script fails by itself, or never trains.
            ConfigError: no batch is in the interval for it.
        """
        self.journal.end_orphans()
        own = next((record for record in self.journal.records() if record.own), None)
        self._tell_up_front()
        if own is None:
            own = self._measure_own()
        else:
            made = counted(len(self.launched()), "launch", "launches")
            self.view.say(f"the search in {self.options.results_dir} goes on, after {made}")
        self.own = own
        if self.launches.seeks_length:
            self.tokens = check_length(self.command, own.events)
        self.launches.refer(own.events)
        facts = own.events["facts"]
        why, given = why_not_divided(own.events), divides_as_given(self.options)
        if self._keeps_division(own.events, own.points):
            self.options = replace(self.options, fix=(*self.options.fix, MICRO), low_batch=None, high_batch=None)
            self.view.say(f"the division of the global batch stays: {why} (--tune {MICRO} frees it all the same)")
        elif why and not given:  # it does not fit, or was freed
            self.view.say(f"look before you take another division of the global batch: {why}")
        self.space = self._make_space(own.events)
        if not self.all_sizes():
            raise ConfigError(self._why_no_sizes())
        points = [] if self.launches.seeks_length else own.points  # of other lengths than what was surveyed
        found = {p.micro: (p.seconds, p.accumulation, p.optimizer_seconds, p.peak) for p in points}
        memory = self.options.memory_limit or facts.get("memory")
        survey = Survey(facts, own.events.get("survey", {}), found, own.events.get("split", {}))
        matters = memory is not None or not self.options.metric.is_timed
        footprint = self._trace(survey) if matters else None
        self.model = CostModel(self.space.tree, own.setting, survey, memory, footprint)
        for record in self.journal.records():
            self._learn(record)

    def _keeps_division(self, events: dict[str, Any], measured: Sequence[Point]) -> bool:
        """Whether a step's gradients depend on its division, which so has to stay where it fits."""
        means = bool(why_not_divided(events)) and not divides_as_given(self.options)
        means = means and MICRO not in self.options.tune
        fits = any(point.micro == events["facts"]["micro"] for point in measured)
        return means and fits and self.options.metric is not Metric.BATCH  # whose micro-batch is what is wanted

    def _why_no_sizes(self) -> str:
        options = self.options
        return (
            f"no global batch from {options.low_batch or 1} to {options.high_batch or 'any size'} with micro-batches "
            f"from {options.low_micro} to {options.high_micro} divides over the processes: give other intervals"
        )

    def _tell_up_front(self) -> None:
        """Before the first launch, which alone knows what the model can: as if it could all."""
        space = Space(
            self.problem.config,
            self.command,
            self.options,
            cuda=has_gpu(),
            can_checkpoint=True,
            checkpoints=True,
            can_chunk=True,
        )
        for line in told_up_front(space):
            self.view.say(line)

    def _trace(self, survey: Survey) -> Footprint | None:
        """The model on the meta device, if it can be had there; ``how_bytes`` says."""
        try:
            footprint = self._ahead.take() or Footprint(survey.facts, survey.found, self.all_sizes())
            micro, steps = self.all_sizes()[0]
            footprint.seconds = (LENGTH_SHARE if self.launches.seeks_length else TRACE_SHARE) * self.options.budget
            on = bool(survey.facts["checkpointing"])
            footprint.predict(config_of(self.space.tree, self.own.setting), micro, steps, checkpointing=on)
        except UnpredictableError as error:
            self.how_bytes = f"by the state plan and the measured activations ({error})"
            return None
        self.how_bytes = "by a trace of the model, corrected by what was measured"
        return footprint

    def _to_trace(self, events: dict[str, Any]) -> tuple[list[tuple[int, int]], list[tuple[dict[str, Any], bool]]]:
        space, facts = self._make_space(events), events["facts"]
        settings = [
            (config_of(space.tree, setting), bool(setting.get(CHECKPOINTING, facts["checkpointing"])))
            for setting in (space.plain(space.own), *space.settings())
        ]
        return self._sizes_of_all(space, facts), settings

    def _make_space(self, events: dict[str, Any]) -> Space:
        facts = events["facts"]
        divides = facts["cuda"] or "pipe" in facts or {TENSOR, SEQUENCE, EXPERTS, MICS, HPZ} & set(self.options.tune)
        return Space(
            self.problem.config,
            self.command,
            self.options,
            cuda=bool(facts["cuda"]),
            can_checkpoint=bool(facts["can_checkpoint"]),
            checkpoints=bool(facts.get("checkpointing")),
            can_chunk=str((facts.get("model") or {}).get("class", "")).endswith("ForCausalLM"),
            division=division_of(facts),
            sizes=sizes_of(events, self.problem.config.resolved) if divides else None,
        )

    def _measure_own(self) -> Record:
        self.view.started(0, "your file", None)
        started = time.time()
        outcome = self.launches.own(self._progress)
        if outcome.kind == "timeout" and self.options.budget < self.options.trial_timeout and not outcome.points:
            message = f"the budget of {self.options.budget:g} s is spent, and your own file has not been measured yet"
            if "Traceback" in outcome.tail:  # it may have failed, and not ended: telemetry, other processes
                message += f". Its last error is {last_error(outcome.tail)}; if that is not why"
            raise TuneError(f"{message}: give more with --budget", outcome.tail)
        if outcome.kind in ("no engine", "no steps") and not outcome.points:
            raise TuneError(f"nothing can be measured with your own file: {outcome.reason}", outcome.tail)
        if outcome.kind in ("crash", "hang", "timeout") and not outcome.points:
            raise TuneError(f"your script, with your own file, failed: {outcome.reason}", outcome.tail)
        if "facts" not in outcome.events:
            raise TuneError(f"your script ran out of memory before it had an engine: {outcome.reason}", outcome.tail)
        if self._keeps_division(outcome.events, outcome.points):
            outcome.points = [p for p in outcome.points if p.micro == outcome.events["facts"]["micro"]]
        space = self._make_space(outcome.events)
        own = space.plain(space.own)
        self.launches.note(own, outcome)
        return self._tell(own, outcome, {}, started, role=ROLE_OWN)

    # -- the loop -------------------------------------------------------------------------------------------------

    def search(self) -> None:
        """Launch until there is a reason to stop, which is then in ``why_stopped``."""
        self.view.say(self._what_the_budget_buys())
        while not self.why_stopped:
            self._rule_out()
            setting = self._choose()
            if setting is None:
                break
            self._try(setting)

    def _what_the_budget_buys(self) -> str:
        """Once it is known what a launch takes."""
        each, after, left = self.typical(), self._after(), max(0.0, self.left)
        takes = sorted(self._takes(setting) for _, setting in self._hopeful(self._ranked()))
        whole, beside = sum(takes) + each * after, takes[:1] and takes[0] < each
        count = sum(total <= left - self._kept() for total in itertools.accumulate(takes))
        confirms = min(after, max(0, int((left - sum(takes[:count])) / max(each, 1e-3))))
        text = f"a launch takes some {duration(each)}"
        text += f", a setting in processes that are there some {duration(takes[0])}" if beside else ""
        enough = [f"for {counted(count, 'setting', 'settings')}"] if count else []
        enough += [f"for {counted(confirms, 'launch', 'launches')} to confirm the best"] if confirms else []
        text += f"; the {duration(left)} that are left are "
        text += f"enough {' and '.join(enough)}" if enough else "too little for one"
        if whole > left and takes:
            count_of_all = f"all {len(takes)} settings" if len(takes) > 1 else "the one setting"
            minutes = math.ceil((self.options.budget - self.left + whole) / 60)
            text += f"; --budget {minutes}m is enough for {count_of_all} that may gain"
        return text

    def _choose(self) -> Setting | None:
        """The next setting; ``None``, with the reason, when there is none."""
        ranked = self._ranked()
        hopeful = [setting for _, setting in self._hopeful(ranked)]
        self.view.expect(min(self.left, sum(map(self._takes, hopeful)) + self.typical() * self._after()))
        self.why_stopped = self._reason_to_stop(min(map(self._takes, hopeful), default=self.typical()))
        if self.why_stopped:
            return None
        if not ranked:
            self.why_stopped = "every setting that can fit was measured"
            return None
        if self.options.sampler == "exhaustive":
            beside = [each for each in hopeful if self.launches.goes_on(each)]
            return min(beside, key=lambda each: each.get(EXPERTS, 0), default=hopeful[0])  # what is divided stays so
        if not hopeful:
            self.why_stopped = f"none of the remaining launches is expected to gain {WORTH:.1%}, by the corrected model"
            return None
        launches = len(self.launched())
        if self.options.sampler == "gridsearch":
            return next(s for s in self.space.settings() if key_of(s) in {key_of(h) for h in hopeful})
        if self.options.sampler == "random" or (launches >= STARTUP and launches % EXPLORE_EVERY == 0):
            return self._suggested({key_of(setting) for _, setting in ranked}) or hopeful[0]
        gains = [(gain / (self._takes(s) + self._costs_others(s, hopeful)), s) for gain, s in self._hopeful(ranked)]
        for kept in (self.typical() * self._after(), self._kept()):  # a gain should be confirmed, too
            affordable = [(gain, s) for gain, s in gains if self._takes(s) + kept <= self.left]
            if affordable:
                return max(affordable, key=lambda each: each[0])[1]
        return hopeful[0]

    def _reason_to_stop(self, takes: float) -> str:
        """
        Args:
            takes: seconds of what would be next.
        """
        launched = self.launched()
        if len(launched) >= self.options.trials:
            return f"{self.options.trials} launches were asked for"
        if takes + self._kept() > self.left:
            return self._why_spent(takes)
        since = self._launches_since_gain(launched)
        if since >= self.options.patience:
            return f"{since} launches in a row brought no gain"
        failed = len([record for record in launched if not record.points])
        if failed >= FAILURES * self.options.patience:
            return f"{failed} launches failed"
        return ""

    @property
    def left(self) -> float:
        """Seconds of the budget that are the search's."""
        return self.launches.left - LR_SHARE * self.options.lr * self.options.budget

    def typical(self) -> float:
        """Seconds of a launch, its start included."""
        others = sorted(each.seconds / self._launches_in(len(each.points))
                        for each in self.launched() if not each.own and not each.goes_on)  # fmt: skip
        return others[len(others) // 2] if others else self.typical_own()

    def typical_own(self) -> float:
        """The same of the user's file once more."""
        return self.own.seconds * (1.0 if "not resizable" in self.own.events else FIRST_SHARE)

    def _launches_in(self, sizes: int) -> int:
        """Of so many sizes of a setting: each is one where the engine cannot change them."""
        return max(1, sizes) if "not resizable" in self.own.events else 1

    def _takes(self, setting: Setting) -> float:
        """Seconds to measure a setting from here."""
        if not self.launches.goes_on(setting):
            return self.typical() * self._launches_in(len(self._sizes(setting)))
        launched = self.launched()
        compiles = {record.key: _compiles(record.setting, launched[:at]) for at, record in enumerate(launched)}
        new = _compiles(setting, launched)
        others = sorted(record.seconds for record in launched if record.goes_on and compiles[record.key] == new)
        share = GOES_ON_SHARE if new else GOES_ON_COMPILED_SHARE
        return others[len(others) // 2] if others else share * self.typical()

    def _costs_others(self, setting: Setting, hopeful: Sequence[Setting]) -> float:
        """Seconds of the start that ``setting`` makes necessary for those that cannot follow it, and could be next."""
        launches = self.launches
        if not launches.goes_on(setting) or all(can_follow(setting, s) for s in hopeful if launches.goes_on(s)):
            return 0.0
        return max(0.0, self.typical() - self._takes(setting))

    def _after(self) -> int:
        """Launches for which time is kept: the two best and the user's file in a turn, and one with more workers."""
        own_is_best = self._best_cost() >= min(map(self.cost, self.own.points), default=math.inf)
        turn = 2 if own_is_best else 3
        return self.options.confirm * (turn + self.own.waits_for_data)

    def _kept(self) -> float:
        """Seconds that nothing new may take: to confirm the best, where that is not the user's file as it is and where
        there is time for it. What is too little for that is for settings, and what they gain is not confirmed."""
        mine = next((p for p in self.own.points if p.micro == self.own.events["facts"]["micro"]), None)
        gains = mine is None or self._best_cost() < self.cost(mine)
        resized = min(map(self.cost, self.own.points), default=math.inf) <= self._best_cost()
        in_one = resized and mine is not None and self.in_one_launch
        least = min(self.typical(), self.typical_own()) if in_one else 2 * self.typical()
        if not gains or least > self.left:
            return 0.0
        return self.again() * min(self._after(), LEAST_AGAIN)

    @property
    def in_one_launch(self) -> bool:
        """Whether one launch can confirm a size beside the user's: it resizes the script's batch. A script that has no
        option for its micro-batch has to be seen to follow its file."""
        return "not resizable" not in self.own.events and MICRO in self.command.mappings

    def again(self) -> float:
        """Seconds of a launch that confirms: what the user's file took while no other was started."""
        started = any(not (each.own or each.goes_on) for each in self.launched())
        return self.typical() if started else self.own.seconds

    def _why_spent(self, takes: float) -> str:
        """What is left of the budget is not enough for a setting of ``takes`` seconds."""
        rest, whole = max(0.0, self.left), self.options.budget * (1 - LR_SHARE * self.options.lr)
        lr = ", with the rest kept for the learning rate" if self.options.lr else ""
        if rest == 0.0:
            return f"the budget of {whole:g} s is spent{lr}"
        text = f"of the budget of {whole:g} s {duration(rest)} were left{lr}, and another setting takes some "
        return text + duration(takes) + (", beside the launches that confirm the best" if takes <= rest else "")

    def _launches_since_gain(self, launched: list[Record]) -> int:
        best, since = math.inf, 0
        for record in launched:
            if not record.points:
                continue
            cost = min((self.cost(point) for point in record.points), default=math.inf)
            best, since = (cost, 0) if cost < best * 0.99 else (best, since + 1)
        return since

    def _ranked(self) -> list[tuple[float, Setting]]:
        """Settings that no worker has taken, most promising first, each with its expected gain over the best so far."""
        taken = self.journal.taken()
        if sum(record.key == self.own.key for record in self.journal.records()) == 1:
            taken -= {self.own.key} if self._known(self.own.setting) else set()
        best, launched = self._best_cost(), self.launched()
        found = []
        for setting in self.space.settings():
            if key_of(setting) in taken:
                continue
            sizes = self._sizes(setting)
            if sizes:
                expected = min(self._predicted_cost(setting, *size) for size in sizes)
                doubt = self._doubt(setting, sizes[0])
                works = _chance_to_work(setting, launched)
                found.append((works * expected_gain(best / expected, doubt), expected / works, setting))
        found.sort(key=lambda item: (-item[0], item[1]))
        return [(gain, setting) for gain, _, setting in found]

    def _doubt(self, setting: Setting, size: tuple[int, int]) -> float:
        """Of a predicted cost, as the standard deviation of its logarithm."""
        if self.options.metric.is_timed:
            return self.model.predict(setting, *size).spread
        limited = self.launches.seeks_length and self.longest(setting) == self.own.events["length"].get("most")
        return 0.0 if limited else BYTES_DOUBT  # what the model's table limits is known

    def _hopeful(self, ranked: list[tuple[float, Setting]]) -> list[tuple[float, Setting]]:
        """Those of which enough gain is expected."""
        return ranked if self.options.sampler == "exhaustive" else [each for each in ranked if each[0] >= WORTH]

    def _suggested(self, open_keys: set[str]) -> Setting | None:
        """Optuna's choice, if it is one that no worker has taken."""
        for _ in range(SUGGESTIONS):
            plain = self.space.plain(self.journal.suggested(self.space.axes))
            if key_of(plain) in open_keys:
                return plain
        return None

    def _rule_out(self) -> None:
        """Settings of which no batch can fit are recorded, without a launch."""
        known = {record.key for record in self.journal.records()}
        for setting in self.space.settings():
            if key_of(setting) in known or self._sizes(setting):
                continue
            sizes = self.all_sizes(setting)
            if not sizes:
                continue
            micro, steps = sizes[0]
            need, reason = self.model.nbytes(setting, micro, steps), self.model.why_not(setting, micro, steps)
            reason = reason or "not even the shortest sequences fit"
            kept = {
                "setting": setting,
                "kind": "ruled out",
                "reason": reason,
                "predicted": {str(micro): [self.model.predict(setting, micro, steps).seconds, need]},
            }
            self.journal.add(setting, self.space.axes, kept, None, ruled_out=True)
            self.view.ruled_out(setting, reason)

    def longest(self, setting: Setting) -> int:
        """Tokens of the longest sequences that are expected to fit; 0 for none."""
        (micro, steps), known = self.all_sizes(setting)[0], self.own.events["length"]
        most, step = known.get("most"), int(known["step"])
        return min(self.model.longest(setting, micro, steps, self.tokens, step), most or MANY)

    # -- one setting ----------------------------------------------------------------------------------------------

    def all_sizes(self, setting: Setting | None = None) -> list[tuple[int, int]]:
        """All (micro-batch, accumulation) of the search, ascending; or of one setting."""
        facts = self.own.events["facts"]
        if setting is None:
            return self._sizes_of_all(self.space, facts)
        stages, chunks = setting.get(PIPE, 1), config_of(self.space.tree, {}).get("ds_hf", {}).get("pipeline", {})
        turns = stages if chunks.get("chunks", 1) > 1 else 1
        sizes = self._sizes_where(facts, self.space.division.of(setting).data)
        return [size for size in sizes if size[1] % turns == 0]

    def _sizes_of_all(self, space: Space, facts: dict[str, Any]) -> list[tuple[int, int]]:
        counts = {space.division.of(setting).data for setting in space.settings()} | {space.division.data}
        return sorted({size for data in counts for size in self._sizes_where(facts, data)})

    def _sizes_where(self, facts: dict[str, Any], data: int) -> list[tuple[int, int]]:
        """Where ``data`` processes read different samples."""
        return points(self.options, data, (facts["micro"], facts["accumulation"]), samplers(facts))

    def data(self, setting: Setting) -> int:
        """Processes that read different samples in a setting."""
        return self.space.division.of(setting).data

    def _sizes(self, setting: Setting) -> list[tuple[int, int]]:
        """The sizes worth measuring for a setting: those that may fit, the most promising first."""
        if self.launches.seeks_length:
            return [size for size in self.all_sizes(setting) if self.longest(setting)]
        known = self._known(setting)
        others = [size for size in self.all_sizes(setting) if size[0] not in known]
        fitting = [size for size in others if not self.model.cannot_fit(setting, *size)]
        fitting.sort(key=lambda size: self._predicted_cost(setting, *size))
        if self.options.sampler == "exhaustive":
            return sorted(fitting)
        costs = [self._predicted_cost(setting, *size) for size in fitting]
        close = [size for size, cost in zip(fitting, costs, strict=True) if cost <= CLOSE * costs[0]]
        if self.options.metric is Metric.BATCH:  # a prediction may be too low: the next smaller ones stand by
            return fitting[: self.options.micros]
        if close and self._is_tight(setting, min(close)):
            close += [max(smaller)] if (smaller := [size for size in fitting if size < min(close)]) else []
        return close[: self.options.micros]

    def _known(self, setting: Setting) -> set[int]:
        """Micro-batches of the user's own setting that its launch has measured, where other sizes are launches."""
        alone = "not resizable" in self.own.events and key_of(setting) == self.own.key
        return {point.micro for point in self.own.points} if alone else set()

    def _is_tight(self, setting: Setting, size: tuple[int, int]) -> bool:
        """Whether the prediction is near the memory, so that a smaller size should stand by."""
        return self.model.memory is not None and self.model.nbytes(setting, *size) > TIGHT * self.model.memory

    def _try(self, setting: Setting) -> None:
        number = len(self.launched())
        name = f"{number:04d}-{_short_hash(setting)}"
        sizes = self._sizes(setting)
        predictions = {size[0]: self.model.predict(setting, *size) for size in sizes}
        predicted = {micro: (found.seconds, found.nbytes) for micro, found in predictions.items()}
        length = self.longest(setting) if self.launches.seeks_length else None
        if length is not None:
            predicted = {}  # seconds and bytes are of the script's own length
        self.view.started(number, setting, predicted, goes_on=self.launches.goes_on(setting), tokens=length)
        trial = self.journal.begin(setting, self.space.axes)
        started = time.time()
        try:
            outcome = self._launch_sizes(name, setting, sizes, length)
            outcome.events["expected"] = {"tokens": length}
        except BaseException:
            self.journal.drop(trial)
            raise
        self._learn(self._tell(setting, outcome, predicted, started, trial=trial))

    def _launch_sizes(
        self, name: str, setting: Setting, sizes: list[tuple[int, int]], length: int | None
    ) -> LaunchOutcome:
        """One launch for all sizes, or one a size where the engine cannot change them."""
        if "not resizable" in self.own.events:
            return self.launches.each_natural(name, setting, sizes, self.data(setting))
        best, data = self._best_point(), self.data(setting)
        each = (
            None
            if best is None or self.options.sampler == "exhaustive" or length
            else best.seconds / best.samples * data
        )  # of one process's samples
        longest = self.own.events.get("longest", {}).get("known", True)
        divided = data if data != self.space.division.data else None
        return self.launches.replayed(
            name, setting, sizes, each, self.view.event, longest=longest, data=divided, length=length
        )

    def _progress(self, event: dict[str, Any]) -> None:
        self.view.event(event)
        if not self.launches.seeks_length:  # a thread would stand in the way of other lengths
            self._ahead.on_event(event)

    # -- what is known --------------------------------------------------------------------------------------------

    def _tell(
        self,
        setting: Setting,
        outcome: LaunchOutcome,
        predicted: dict[int, tuple[float, int]],
        started: float,
        *,
        trial: optuna.Trial | None = None,
        role: str = "",
    ) -> Record:
        """Into the journal, and to the view."""
        kept = attributes_of(setting, outcome, predicted, started)
        if role:
            kept["role"] = role
        best = min(outcome.points, key=self.cost, default=None)
        value = None if best is None else self._value(best)
        if trial is not None:
            record = self.journal.end(trial, kept, value)
        else:
            axes = self._make_space(outcome.events).axes
            record = self.journal.add(setting, axes, kept, value, ruled_out=False)
        self.view.ended(record)
        return record

    def _learn(self, record: Record) -> None:
        if record.points and not self.launches.seeks_length:
            errors = [p.error or (p.high - p.low) / (4 * p.seconds) for p in record.points]  # 95 % are four errors
            sizes = [(p.micro, p.accumulation, p.seconds) for p in record.points]
            self.model.observe(record.setting, [(*size, error) for size, error in zip(sizes, errors, strict=True)])

    def launched(self) -> list[Record]:
        return [record for record in self.journal.records() if record.kind != "ruled out"]

    def _value(self, point: Point) -> float:
        """In the metric's unit, for Optuna."""
        return value_of(point, self.options.metric, self.flops)

    @property
    def flops(self) -> float:
        """Operations of one sample on each device; 1 while they are unknown."""
        own = getattr(self, "own", None)
        found = own.events.get("survey", {}).get("flops") if own else None
        return float(found) / samplers(own.events["facts"]) if own and found else 1.0

    def cost(self, point: Point) -> float:
        """What is minimized: bytes, seconds a step, one over the samples at once or the tokens of a sequence, or
        seconds a sample (throughput and FLOPS are one over it)."""
        if self.launches.seeks_length:  # of equal ones the faster
            return (1 + TIE * point.seconds / point.samples) / max(point.length, 1)
        return self._search_cost(point.seconds, point.peak, point.samples, point.micro * point.data)

    def _predicted_cost(self, setting: Setting, micro: int, accumulation: int) -> float:
        if self.launches.seeks_length:
            return 1 / max(self.longest(setting), 1)
        found = self.model.predict(setting, micro, accumulation)
        data = self.data(setting)
        return self._search_cost(found.seconds, found.nbytes, micro * accumulation * data, micro * data)

    def _search_cost(self, seconds: float, nbytes: int, numel: int, at_once: int) -> float:
        metric = self.options.metric
        if metric is Metric.BATCH:  # of equal ones the faster
            return (1 + TIE * seconds / numel) / at_once
        return nbytes if metric is Metric.MEMORY else seconds if metric is Metric.LATENCY else seconds / numel

    def _best_cost(self) -> float:
        return min((self.cost(point) for record in self.launched() for point in record.points), default=math.inf)

    def _best_point(self) -> Point | None:
        found = [point for record in self.launched() for point in record.points]
        return min(found, key=lambda p: p.seconds / p.samples, default=None)


def expected_gain(ratio: float, spread: float) -> float:
    """Mean of max(0, log(best / cost)): what a launch is expected to gain, as a share of the best cost.

    Args:
        ratio: of the best cost so far to the predicted one; infinite while nothing was measured.
        spread: standard deviation of the logarithm of the predicted cost.
    """
    if not math.isfinite(ratio):
        return math.inf
    mean = math.log(ratio)
    if spread <= 0:
        return max(0.0, mean)
    density = statistics.NormalDist(mean, spread)
    return mean * (1 - density.cdf(0.0)) + spread**2 * density.pdf(0.0)


def _chance_to_work(setting: Setting, launched: Sequence[Record]) -> float:
    """After launches that failed: each blames equally what it had and no other launch worked with."""
    worked = {value for record in launched if record.points for value in record.setting.items()}
    chance = 1.0
    for record in launched:
        blamed = set() if record.points else record.setting.items() - worked
        if blamed:
            chance *= 1 - BLAME * len(setting.items() & blamed) / len(blamed)
    return chance


def _compiles(setting: Setting, before: list[Record]) -> bool:
    """Whether ``setting`` is the first whose blocks are compiled."""
    how = setting.get(COMPILE)
    return bool(how) and not any(record.points and record.setting.get(COMPILE) == how for record in before)


def _short_hash(setting: Setting) -> str:
    return hashlib.blake2b(key_of(setting).encode(), digest_size=4).hexdigest()


def why_not_divided(events: dict[str, Any]) -> str:
    """Why another division of the global batch would train something else; empty where it would not.

    Args:
        events: of the launch of the user's file.
    """
    if events.get("survey", {}).get("means"):
        return (
            "the model's loss is a mean over each micro-batch, which the Trainer does not divide by their number, so "
            "that another division has other gradients (model.accepts_loss_kwargs = False, before the Trainer is made, "
            "mends that and frees the division)"
        )
    if why := events.get("together", {}).get("why"):
        return f"{why}, so that another division trains something else"
    if "not resizable" in events and "pipe" not in events.get("facts", {}):  # a pipeline's is looked at
        return (
            "the script's own loss cannot be looked at, and another division trains something else where its samples "
            "count together (a contrastive loss, or a sum)"
        )
    return ""
