"""What a search remembers of its trials, and how it is kept in Optuna's journal.

A record is one setting: launched, or ruled out without a launch. Everything the report needs is in the trial's user
attributes, so a search that was killed, or one of several workers, knows what all of them found.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial

from ds_hf.autotune.options import Metric
from ds_hf.autotune.space import Setting, key_of, label_of
from ds_hf.autotune.trial import LaunchOutcome, Point, samplers

__all__ = ["LEAST_WAIT", "Record", "attributes_of", "record_of", "value_of", "wait_share"]

ROLE_OWN = "own"
LEAST_WAIT = 0.05  # of a step: less is not worth a launch


@dataclass(frozen=True)
class Record:
    """One setting.

    Attributes:
        number: Optuna's. setting: axis -> value. kind, reason: as in ``LaunchOutcome``; "ruled out": never launched.
        own: the user's file.
        points: measured. predicted: micro-batch -> (seconds, bytes) before the launch.
        best: the point with the best value. value: in the metric's unit.
        started, seconds: wall clock of the launch.
        natural, waits: seconds of the script's own steps, and how many of them for data.
        natural_error: as in ``LaunchOutcome``.
    """

    number: int
    setting: Setting
    kind: str
    reason: str = ""
    own: bool = False
    points: tuple[Point, ...] = ()
    too_large: tuple[int, ...] = ()
    predicted: dict[int, tuple[float, int]] = field(default_factory=dict)
    natural: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()
    natural_error: float = 0.0
    events: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    seconds: float = 0.0

    @functools.cached_property
    def key(self) -> str:
        return key_of(self.setting)

    @property
    def label(self) -> str:
        return label_of(self.setting)

    @property
    def goes_on(self) -> bool:
        """Whether it was measured in processes that were there."""
        return bool(self.events.get("launch", {}).get("goes_on"))

    @property
    def waits_for_data(self) -> bool:
        """Whether the script's own steps wait for data for long enough to do something about it."""
        return wait_share(self.natural, self.waits) >= LEAST_WAIT

    def best(self, metric: Metric) -> Point | None:
        """The measured point that is best by ``metric``."""
        sign = -1 if metric.maximize else 1
        return min(self.points, key=lambda point: sign * value_of(point, metric), default=None)


def wait_share(steps: Sequence[float], waits: Sequence[float]) -> float:
    """How much of a step is waiting for data."""
    return statistics.median(waits) / statistics.median(steps) if steps and waits else 0.0


def value_of(point: Point, metric: Metric, flops: float = 1.0) -> float:
    """A point in the metric's unit; ``flops`` are the operations of one sample on each device."""
    if metric is Metric.LATENCY:
        return point.seconds
    if metric is Metric.MEMORY:
        return float(point.peak)
    if metric is Metric.LENGTH:
        return float(point.length)
    if metric is Metric.BATCH:
        return float(point.micro * point.data)
    if metric is Metric.FLOPS:
        return flops * point.samples / point.seconds
    return point.samples / point.seconds


def attributes_of(
    setting: Setting, outcome: LaunchOutcome, predicted: dict[int, tuple[float, int]], started: float
) -> dict[str, Any]:
    """What is kept of a launch, as JSON."""
    return {
        "setting": setting,
        "kind": outcome.kind,
        "reason": outcome.reason,
        "points": [dataclasses.asdict(point) for point in outcome.points],
        "too_large": outcome.too_large,
        "natural": outcome.natural,
        "waits": outcome.waits,
        "natural_error": outcome.natural_error,
        "events": {**outcome.events, "notes": outcome.notes},
        "predicted": {str(micro): list(value) for micro, value in predicted.items()},
        "started": started,
        "seconds": outcome.seconds,
    }


def record_of(trial: FrozenTrial) -> Record | None:
    """The record in a trial; ``None`` for one that says nothing: still running, or a suggestion that was dropped."""
    kept = trial.user_attrs
    if "kind" not in kept:
        return None
    facts = kept.get("events", {}).get("facts", {})
    return Record(
        number=trial.number,
        setting=dict(kept["setting"]),
        kind=kept["kind"],
        reason=kept.get("reason", ""),
        own=kept.get("role") == ROLE_OWN,
        points=tuple(Point(**{"data": samplers(facts), **point}) for point in kept.get("points", ())),
        too_large=tuple(kept.get("too_large", ())),
        predicted={int(micro): (value[0], value[1]) for micro, value in kept.get("predicted", {}).items()},
        natural=tuple(kept.get("natural", ())),
        waits=tuple(kept.get("waits", ())),
        natural_error=kept.get("natural_error", 0.0),
        events=dict(kept.get("events", {})),
        started=kept.get("started", 0.0),
        seconds=kept.get("seconds", 0.0),
    )
