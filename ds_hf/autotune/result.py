"""What came out: the best setting or the user's own, how sure that is, and the command that uses it."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_hf.autotune.command import LENGTH
from ds_hf.autotune.confirm import LEAST_GAIN, Again, Contest, Contestant
from ds_hf.autotune.division import PIPE
from ds_hf.autotune.reasons import MICRO, STEPS, Change, changes_of, limits_of
from ds_hf.autotune.records import Record
from ds_hf.autotune.space import (
    CHECKPOINTING,
    WORKERS,
    Setting,
)
from ds_hf.autotune.study import Search
from ds_hf.autotune.trial import LaunchOutcome, Point, launch_words
from ds_hf.config.load import examine
from ds_hf.config.schema import schema_moved
from ds_hf.config.triple import WorldSize
from ds_hf.errors import DsHfError
from ds_hf.lr import LrResult
from ds_hf.measure.machine import Estimate, gain_of
from ds_hf.printable import counted

__all__ = ["TUNED", "NothingFits", "Result", "final_words", "make_result"]

UNSURE = 1.25  # of the upper end of a gain over the gain: more makes no figure
TUNED = "ds_config.tuned.json"


class NothingFits(DsHfError):
    """No setting could be measured."""


@dataclass(repr=False)
class Result:
    """The end of a search.

    Attributes:
        best: record and point that won; ``own``: the user's, ``None`` when that did not fit.
        kept: the user's file stays, as nothing was better by more than the noise.
        gain: how many times better the best is in the engine (1 when kept); ``interval``: 95 % of it.
        trusted: it was started again beside the user's file, and the intervals separated; ``why_not`` where not.
        launches: of the best and of the user's file, on which ``gain`` rests.
        again: launches after the search.
        confirmed: the last launch of the result as a user starts it; ``None`` when there was none.
        script: seconds of the script's own step, with the user's file and with the result.
        rejected: what looked better and was not when the script itself ran with it.
        workers: of the script's DataLoader, where more than it has pay.
        limits: shares of a step's time, and what limits it.
        paths: what was written: "config" (the best file), "report", "trials", "reasons", "command".
    """

    best: tuple[Record, Point]
    own: Point | None
    kept: bool
    gain: float
    config: dict[str, Any]
    interval: tuple[float, float] = (1.0, 1.0)
    trusted: bool = False
    why_not: str = ""
    launches: tuple[int, int] = (1, 1)
    script: tuple[float | None, float | None] = (None, None)
    again: list[Again] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    confirmed: LaunchOutcome | None = None
    limits: dict[str, float] = field(default_factory=dict)
    limit: str = ""
    why_stopped: str = ""
    rejected: str = ""
    workers: int | None = None
    learning_rate: LrResult | None = None
    paths: dict[str, Path] = field(default_factory=dict)

    def __repr__(self) -> str:
        """In a line, for notebooks: what is there to read is above."""
        record, point = self.best
        gain = (
            "the user's file is kept"
            if self.kept
            else f"{self.gain:.2f} x" + ("" if self.trusted else ", not confirmed")
        )
        size = f"micro-batch {point.micro} x {point.accumulation}"
        return f"<Result: {record.label}, {size}, {gain}; {self.paths.get('config', 'nothing written')}>"

    @property
    def table(self) -> list[dict[str, str]]:
        """All that was measured or ruled out: the rows of ``trials.csv``."""
        return list(csv.DictReader(io.StringIO(self.paths["trials"].read_text("utf-8"))))

    @property
    def is_certain(self) -> bool:
        """Whether the gain is known well enough to be told as a figure."""
        return self.trusted and self.interval[1] <= UNSURE * self.gain


def make_result(contest: Contest) -> Result:
    """Choose among what was measured.

    Raises:
        NothingFits: nothing was.
    """
    search, top, own = contest.search, contest.best(), contest.own()
    if top is None:
        raise NothingFits(_why_nothing_fits(search))
    gain, low, high = (1.0, 1.0, 1.0) if own is None else gain_of(own.estimate, top.estimate)
    kept = own is not None and (bool(contest.denied) or top.key == own.key or gain < LEAST_GAIN or low <= 1)
    chosen = own if kept and own is not None else top
    best, size = (chosen.record, chosen.point), (chosen.point.micro, chosen.point.accumulation)
    config = search.launches.final_config(best[0].setting, size, chosen.point.data)
    config = schema_moved(config, search.command.config)
    measured = None if own is None else _shown(search, own)
    result = Result(best, measured, kept, 1.0 if kept else gain, config, why_stopped=search.why_stopped)
    result.best = (best[0], _shown(search, chosen))
    result.interval = (low, high) if not kept or top is not chosen else (1.0, 1.0)
    result.trusted = bool(chosen.again and (own is None or own.again or not search.options.metric.is_timed))
    result.why_not = "" if result.trusted else contest.why_ended or "it was not started again"
    result.again = list(contest.launches)
    result.launches = (chosen.estimate.launches, 0 if own is None else own.estimate.launches)
    result.script = (_script(contest, own), _script(contest, chosen))
    result.confirmed = chosen.again[-1] if chosen.again and not kept else None
    result.rejected = _rejected(contest, top, own) if kept else ""
    result.changes = [] if kept else changes_of(search, result.best)
    result.words = final_words(search, best[0].setting, size, length=chosen.point.length or None)
    result.limits, result.limit = limits_of(search, result.best)
    facts = search.own.events["facts"]
    processes = int(facts.get("processes") or facts["world_size"])
    claims = search.space.division.of(best[0].setting).claims
    examine(config, world=WorldSize(processes, "the search"), allow_auto=True, given=claims)  # never write a bad file
    return result


def _shown(search: Search, chosen: Contestant) -> Point:
    """The point with what all its launches say together."""
    if not search.options.metric.is_timed:
        return chosen.point
    found, unit = chosen.estimate, search.cost(chosen.point) / chosen.point.seconds
    low, high = found.low / unit, found.high / unit
    return replace(chosen.point, seconds=found.seconds / unit, low=low, high=high, error=found.error)


def _script(contest: Contest, chosen: Contestant | None) -> float | None:
    found: Estimate | None = None if chosen is None else contest.natural(chosen)
    return None if found is None or chosen is None else found.seconds * chosen.point.samples


def _rejected(contest: Contest, top: Contestant, own: Contestant | None) -> str:
    """What looked better than the user's file and is not."""
    labels = {(r.key, p.micro, p.accumulation): r.label for r in contest.search.launched() for p in r.points}
    said = [f"{labels[key]} was fast in the engine, but {reason}" for key, reason in contest.failed.items()]
    said += [contest.denied] if contest.denied else []
    if own is not None and top.key != own.key and not said:
        gain, low, high = gain_of(own.estimate, top.estimate)
        each = counted(min(top.estimate.launches, own.estimate.launches), "launch", "launches")
        said.append(f"the best other setting ({top.record.label}) is {gain:.2f} x as fast, {low:.2f} to {high:.2f}, "
                    f"by {each} of each")  # fmt: skip
    return "; ".join(said)


def _why_nothing_fits(search: Search) -> str:
    records = search.journal.records()
    lines = [f"  {record.label}: {record.reason or record.kind}" for record in records[:8]]
    return "\n".join(
        [
            "no setting could be measured; nearest first:",
            *lines,
            "free more keys (--tune all, gradient checkpointing), or use more devices or a smaller model",
        ]
    )


def final_words(
    search: Search,
    setting: Setting,
    size: tuple[int, int],
    workers: int | None = None,
    *,
    length: int | None = None,
) -> list[str]:
    """The whole command with the tuned file."""
    values: dict[str, object] = {MICRO: size[0], STEPS: size[1]}
    for name in (CHECKPOINTING, PIPE):
        if name in setting and setting[name] != search.space.own[name]:
            values[name] = setting[name]
    if workers is not None:
        values[WORKERS] = workers
    if length is not None:
        values[LENGTH] = length
    path = search.options.results_dir / TUNED
    words = search.command.words(path, values)
    whole = launch_words(search.options.launcher, search.problem.processes, words)
    return ["torchrun", *whole[3:]] if not search.options.launcher else whole
