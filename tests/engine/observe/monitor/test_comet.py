"""Comet: what the package is told, by a module in its place; how often."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from ds_hf.config.types import CometSection
from ds_hf.engine.observe.monitor import CometMonitor
from ds_hf.engine.observe.monitor.comet import EventsLogScheduler, check_comet_availability
from ds_hf.errors import ConfigError

OWN: dict[str, Any] = {
    "api_key": "k", "project": "p", "workspace": "w", "experiment_key": "e", "mode": "create", "online": False,
}  # fmt: skip


class Experiment:
    def __init__(self) -> None:
        self.name = ""
        self.logged: list[tuple[str, float, int]] = []

    def set_name(self, name: str) -> None:
        self.name = name

    def log_metric(self, name: str, value: float, step: int) -> None:
        self.logged.append((name, value, step))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each ``comet_ml.start``."""
    made: list[dict[str, Any]] = []
    fake: Any = ModuleType("comet_ml")
    fake.start = lambda **given: (made.append(given), Experiment())[1]
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    return made


def test_an_experiment_is_started_with_the_section_and_told_at_intervals(started: list[Any]) -> None:
    monitor = CometMonitor(CometSection(enabled=True, samples_log_interval=16, experiment_name="n", **OWN))
    assert started == [OWN]
    assert monitor.experiment.name == "n"
    for x in range(0, 40, 8):
        monitor.write_events([("a", x / 2, x), *([("b", 1.0, x)] if x >= 8 else [])])
    assert [event for event in monitor.experiment.logged if event[0] == "a"] == [
        ("a", 0, 0),
        ("a", 8, 16),
        ("a", 16, 32),
    ]
    assert [event[2] for event in monitor.experiment.logged if event[0] == "b"] == [8, 24]
    assert (monitor.enabled, monitor.samples_log_interval) == (True, 16)


def test_defaults_leave_everything_to_comet(started: list[Any]) -> None:
    monitor = CometMonitor(CometSection(enabled=True))
    assert started == [dict.fromkeys(OWN)]
    assert (monitor.experiment.name, monitor.samples_log_interval) == ("", 100)


def test_switched_off_and_on_other_ranks_nothing_is_started(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    CometMonitor(CometSection()).write_events([("a", 1.0, 1)])
    monkeypatch.setenv("RANK", "1")
    CometMonitor(CometSection(enabled=True)).write_events([("a", 1.0, 1)])
    assert started == []


def test_after_going_back_records_begin_anew() -> None:
    intervals = EventsLogScheduler(10)
    assert [intervals.needs_logging("a", x) for x in (100, 109, 110, 50, 55, 60)] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]


def test_a_missing_or_old_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"pip install 'comet_ml>=3\.41\.0', or set comet\.enabled to false"):
        CometMonitor(CometSection(enabled=True))
    old: Any = ModuleType("comet_ml")
    old.__version__ = "3.30.0"
    monkeypatch.setitem(sys.modules, "comet_ml", old)
    with pytest.raises(ConfigError, match=r"comet_ml 3\.30\.0 is too old.*\n.*pip install 'comet_ml>=3\.41\.0'"):
        check_comet_availability()
