"""The monitors that are on, as one: ``engine.monitor``.

Invariants: only global rank 0 has any; events reach each monitor in the order in which they were given, for services do
not go back. Numbers on a GPU are copied to the host beside the computation; their events, and those after them, are
written at a later call, when they have arrived. ``flush`` waits for them; so does Python's exit, for a while.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from ds_hf.config.types import CometSection, Config, CsvMonitorSection, TensorboardSection, WandbSection
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.observe.monitor.base import Event, Monitor, Writer, is_writing_rank
from ds_hf.engine.observe.monitor.comet import CometMonitor
from ds_hf.engine.observe.monitor.csv_files import CsvMonitor
from ds_hf.engine.observe.monitor.late import LateCopy, later
from ds_hf.engine.observe.monitor.tensorboard import TensorBoardMonitor
from ds_hf.engine.observe.monitor.wandb import WandbMonitor
from ds_hf.errors import ConfigError

__all__ = ["MonitorMaster", "open_monitors", "wait_at_exit"]

_MOST_WAITING = 1000  # calls whose numbers have not arrived; more are waited for
PATIENCE_AT_EXIT = 5.0  # seconds: after an error the GPU may never come to what was queued


class MonitorSections(Protocol):
    """The four sections; ``Config`` has them."""

    @property
    def tensorboard(self) -> TensorboardSection: ...
    @property
    def wandb(self) -> WandbSection: ...
    @property
    def csv_monitor(self) -> CsvMonitorSection: ...
    @property
    def comet(self) -> CometSection: ...


class MonitorMaster(Monitor):
    """All monitors that ``monitor_config`` switches on.

    Attributes:
        enabled: one of them is on; the same on every rank.
        tb_monitor, wandb_monitor, csv_monitor, comet_monitor: ``None`` where off, and on ranks other than 0.

    Raises:
        ConfigError: a package or folder is not there.
    """

    def __init__(self, monitor_config: MonitorSections) -> None:
        super().__init__(monitor_config)
        config = monitor_config
        self.enabled = any(s.enabled for s in (config.tensorboard, config.wandb, config.csv_monitor, config.comet))
        here = self.enabled and is_writing_rank()
        # What costs least first: a missing folder is found before a run is begun at a service.
        self.csv_monitor = CsvMonitor(config.csv_monitor) if here and config.csv_monitor.enabled else None
        self.tb_monitor = TensorBoardMonitor(config.tensorboard) if here and config.tensorboard.enabled else None
        self.wandb_monitor = WandbMonitor(config.wandb) if here and config.wandb.enabled else None
        self.comet_monitor = CometMonitor(config.comet) if here and config.comet.enabled else None
        found = (self.csv_monitor, self.tb_monitor, self.wandb_monitor, self.comet_monitor)
        self._writers: list[Writer] = [writer for writer in found if writer is not None]
        self._waiting: deque[list[Event]] = deque()
        if self._writers:
            atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def writes(self) -> bool:
        """Whether events given on this process go anywhere."""
        return bool(self._writers)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Give each event to each monitor; on ranks other than 0 nothing happens.

        Args:
            event_list: (name, number or tensor of one element, ``engine.global_samples``).
        """
        if self._writers:
            self._waiting.append([(name, later(value), samples) for name, value, samples in event_list])
            while self._waiting and (len(self._waiting) > _MOST_WAITING or _arrived(self._waiting[0])):
                self._write_oldest()

    def _write_oldest(self) -> None:
        events = [(name, v.item() if isinstance(v, LateCopy) else v, x) for name, v, x in self._waiting.popleft()]
        for writer in self._writers:
            writer.write_events(events)

    def flush(self) -> None:
        """Return when everything given so far is written."""
        while self._waiting:
            self._write_oldest()

    def close(self) -> None:
        """Write what waits and let go of files; events that come later open them again."""
        self.flush()
        for writer in self._writers:
            writer.close()


def wait_at_exit(ready: Callable[[], bool]) -> bool:
    """Wait for ``ready()`` as long as an exiting process may; whether it came."""
    until = time.monotonic() + PATIENCE_AT_EXIT
    while not ready() and time.monotonic() < until:
        time.sleep(0.01)
    return ready()


def _close_at_exit(reference: weakref.ref[MonitorMaster]) -> None:
    master = reference()
    if master is not None and wait_at_exit(lambda: all(map(_arrived, master._waiting))):
        master.close()


def _arrived(events: list[Event]) -> bool:
    return all(value.ready for _, value, _ in events if isinstance(value, LateCopy))


def open_monitors(settings: Config, axis: Axis, *, silent: bool = False) -> MonitorMaster:
    """The monitors of an engine. All ranks call it: what goes wrong on rank 0 is raised on every rank.

    Args:
        silent: have none, whatever the settings say: the steps of a trial do not belong among those of a run.

    Raises:
        ConfigError: a package or folder is not there, or a service refused.
    """
    if silent:
        names = ("tensorboard", "wandb", "csv_monitor", "comet")
        settings = replace(settings, **{name: replace(getattr(settings, name), enabled=False) for name in names})
    failure: Exception | None = None
    try:
        master = MonitorMaster(settings)
    except Exception as error:  # everything: wandb and comet_ml raise errors of their own
        failure, master = error, None
    any_on = master is None or master.enabled
    if any_on and dist.get_world_size() > 1:
        told = [None if failure is None else str(failure)]
        with axis.log("broadcast", "whether the monitors could be opened"):
            dist.broadcast_object_list(told, 0)
        if told[0] is not None and failure is None:
            raise ConfigError(f"the monitors could not be opened on rank 0: {told[0]}")
    if isinstance(failure, ConfigError):
        raise failure
    if failure is not None:
        raise ConfigError(f"a monitor could not be opened: {type(failure).__name__}: {failure}") from failure
    assert master is not None
    return master
