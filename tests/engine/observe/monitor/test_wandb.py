"""Weights & Biases: what the package is told, by a module in its place."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from ds_hf.config.types import WandbSection
from ds_hf.engine.observe.monitor import WandbMonitor
from ds_hf.engine.observe.monitor.wandb import check_wandb_availability
from ds_hf.errors import ConfigError

SECTION = WandbSection(enabled=True, group="g", team="t", project="p")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What the package in ``wandb``'s place was asked to do."""
    made: list[tuple[str, dict[str, Any]]] = []
    fake: Any = ModuleType("wandb")
    fake.init = lambda **given: made.append(("init", given))
    fake.log = lambda data, **given: made.append(("log", {"data": data, **given}))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return made


def test_one_run_and_one_record_for_each_count_of_samples(calls: list[Any]) -> None:
    monitor = WandbMonitor(SECTION)
    monitor.write_events([("a", 1.0, 8), ("b", 2.0, 8), ("a", 3.0, 16)])
    monitor.log({"mine": 1}, commit=False)
    assert calls == [
        ("init", {"project": "p", "group": "g", "entity": "t"}),
        ("log", {"data": {"a": 1.0, "b": 2.0}, "step": 8, "commit": None}),
        ("log", {"data": {"a": 3.0}, "step": 16, "commit": None}),
        ("log", {"data": {"mine": 1}, "step": None, "commit": False}),
    ]
    assert (monitor.enabled, monitor.group, monitor.team, monitor.project) == (True, "g", "t", "p")
    check_wandb_availability()


def test_switched_off_and_on_other_ranks_nothing_is_begun(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    WandbMonitor(WandbSection()).log({"a": 1})
    monkeypatch.setenv("RANK", "1")
    monitor = WandbMonitor(SECTION)
    monitor.write_events([("a", 1.0, 8)])
    monitor.log({"a": 1})
    assert calls == []


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'wandb', or set wandb\.enabled to false"):
        WandbMonitor(SECTION)
    with pytest.raises(ConfigError):
        check_wandb_availability()
    assert not WandbMonitor(WandbSection()).enabled
