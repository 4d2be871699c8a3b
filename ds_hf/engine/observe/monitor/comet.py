"""Metrics of a Comet experiment; needs the package ``comet_ml``, 3.41 or newer. Comet ends it when Python exits."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ds_hf.engine.observe.monitor.base import Event, Writer, require
from ds_hf.errors import ConfigError, Fault

__all__ = ["CometMonitor", "EventsLogScheduler", "check_comet_availability"]

_NEEDS = ("comet_ml", "comet", "comet_ml>=3.41.0")  # module, section, package


class CometMonitor(Writer):
    """The section ``comet``. What it leaves out (key, workspace, ...) is read from Comet's own settings.

    Attributes:
        samples_log_interval: of one name an event is sent when this many samples passed since the last.
        experiment: Comet's; ``None`` where nothing is written.
    """

    section = "comet"

    def __init__(self, comet_config: Any) -> None:
        self.samples_log_interval: int = comet_config.samples_log_interval
        self.experiment: Any = None
        self._intervals = EventsLogScheduler(self.samples_log_interval)
        super().__init__(comet_config)

    def _open(self) -> None:
        config = self.monitor_config
        self.experiment = _comet_ml().start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self.experiment.set_name(config.experiment_name)

    def _write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            if self._intervals.needs_logging(name, samples):
                self.experiment.log_metric(name, value, step=samples)


class EventsLogScheduler:
    """Which events are sent: of each name the first, and then one when ``samples_log_interval`` samples passed."""

    def __init__(self, samples_log_interval: int) -> None:
        self._interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        """Whether to send an event; if so, the interval begins anew. After going back, as to a checkpoint, too."""
        last = self._last.get(name)
        if last is not None and 0 <= current_sample - last < self._interval:
            return False
        self._last[name] = current_sample
        return True


def check_comet_availability() -> None:
    """Raises:
    ConfigError: there is no ``comet_ml`` that is new enough.
    """
    _comet_ml()


def _comet_ml() -> ModuleType:
    found = require(*_NEEDS)
    if not hasattr(found, "start"):
        problem = f"comet_ml {getattr(found, '__version__', '')} is too old: it has no start()"
        raise ConfigError([Fault("/comet/enabled", problem, f"pip install '{_NEEDS[2]}'")])
    return found
