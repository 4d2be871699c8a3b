"""``attach``: record the steps of an engine, as ``ds_hf.report`` asks."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ds_hf.engine.comm import collectives
from ds_hf.engine.observe.report.feed import figures_of, mean_of
from ds_hf.engine.observe.report.files import POINTER, ReportFile, require_writable
from ds_hf.engine.observe.report.finisher import Finisher
from ds_hf.engine.observe.report.header import header_of
from ds_hf.engine.observe.report.memory import MEMORY_STEP, MemoryWatch
from ds_hf.engine.observe.report.recorder import DeviceRecorder, RecordedStep, Recorder
from ds_hf.engine.observe.report.spans import Key
from ds_hf.engine.observe.report.wiring import Wiring
from ds_hf.errors import ConfigError
from ds_hf.log import logger, say, warn_once
from ds_hf.measure.saving import PROFILE_ENV, SaveGuard, leave

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Report", "agree_on_folder", "attach"]

makes_pages = True  # at the end of training; tests that record and do not look switch it off

_active: weakref.ReferenceType[Report] | None = None  # logs of collectives and loaders belong to the process


def agree_on_folder(folder: str) -> Path:
    """The folder, if every process can write to it. All processes call it, before anything is built.

    Raises:
        ConfigError: on every process, where one cannot.
    """
    fault: ConfigError | None = None
    path = Path(folder).expanduser().absolute()
    try:
        require_writable(path)
    except ConfigError as error:
        fault = error
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, None if fault is None else fault.faults[0].message)
    if fault is not None:
        raise fault
    for rank, message in enumerate(faults):
        if message:
            raise ConfigError(f"rank {rank}: {message}", POINTER)
    return path


class Report:
    """What records one engine.

    Attributes:
        folder: where the ranks write.
        told: its words have been shown.
    """

    told = False

    def __init__(self, engine: CoreEngine, folder: Path) -> None:
        self.folder = folder
        self._last = int(os.environ.get(PROFILE_ENV) or 0) or None  # of ds-hf profile: the script ends with this step
        self._file = ReportFile(folder, engine.mesh.world.rank)
        self._header = header_of(engine)
        self._file.add(self._header)
        every = engine.settings.ds_hf.report_steps == "all"
        if engine.device.type == "cuda":
            self.recorder: Recorder = DeviceRecorder(self._file, engine.device, every=every)
        else:
            self.recorder = Recorder(self._file, every=every)
        self._finisher: Finisher | None = None
        if engine.mesh.world.rank == 0 and makes_pages and not os.environ.get(PROFILE_ENV):
            self._finisher = Finisher(folder)
        self._steps: deque[dict[str, float]] = deque(maxlen=256)  # since the last look at them
        self._samples: dict[int, int] = {}  # that were trained with when a step ended, for monitors
        self._monitor = engine.monitor if engine.mesh.world.rank == 0 and engine.monitor.enabled else None
        self.recorder.listeners.append(self._on_step)
        self._wiring = Wiring(engine, self.recorder, self.close)
        balance = next((each for each in engine.events.observers if hasattr(each, "told")), None)
        self._balance = None if balance is None else weakref.ref(balance)
        self._closed = False
        engine.step_hooks.append(self._after_step)
        if self._last is not None:
            self._guard = SaveGuard(self._left_out)
        self._at_exit = _Closing(self)
        atexit.register(self._at_exit)
        self._first = engine.global_steps
        self._memory: MemoryWatch | None = None
        self.recorder.begin(engine.global_steps + 1)

    def _left_out(self, what: str) -> None:
        """The script wanted to save: not a usual step, though nothing is saved."""
        logger.warning("%s is left out: ds-hf profile saves nothing", what)
        if self.recorder.on:
            self.recorder.close(self.recorder.open(self.recorder.number(Key("checkpoint", what))))

    def _after_step(self, engine: CoreEngine) -> None:
        """Step hook: one step ends here, and the next begins."""
        recorder = self.recorder
        if recorder.on and self._monitor is not None:
            self._samples[engine.global_steps] = engine.global_samples
        if self._memory is not None:
            self._file.add(self._memory.result(engine.global_steps, engine.mesh.world.rank))
            self._memory = None
        recorder.end(engine.global_steps, engine.step_samples // engine.mesh.shape.data)
        if self._file.fault:
            warn_once(f"{self._file.fault}: nothing more is recorded for the report")
            self.close()
        elif self._last is not None and engine.global_steps - self._first >= self._last:
            self.close()
            collectives.barrier(engine.mesh.world)
            leave(0)
        else:
            recorder.begin(engine.global_steps + 1)
            if engine.global_steps + 1 - self._first == MEMORY_STEP and recorder.on and _countable(engine):
                self._memory = MemoryWatch(engine, recorder)

    def _on_step(self, step: RecordedStep) -> None:
        """A step's times are known."""
        found = figures_of(step, self.recorder.keys, self._header)
        self._steps.append(found)
        if self._monitor is not None:
            x = self._samples.pop(step.number, 0)
            self._monitor.write_events([(f"Train/Step/{name}", value, x) for name, value in found.items()])

    def figures(self) -> dict[str, float]:
        """The mean of the steps that were recorded since the last call, as ``feed`` has them; empty without any."""
        found = mean_of(self._steps) if self._steps else {}
        self._steps.clear()
        return found

    def close(self) -> None:
        """Record nothing more, and have the page made; the engine is as without a report."""
        if self._closed:
            return
        self._closed = True
        self.recorder.finish()
        self._wiring.remove()
        if (balance := None if self._balance is None else self._balance()) is not None:
            self._file.add({"experts": balance.told()})
        self._file.add({"end": True})
        self._file.close()
        if self._finisher is not None:
            self._finisher.finish()

    def words(self) -> str:
        """Where the time went, as a paragraph, on rank 0; waits for the page, and ends the recording."""
        self.close()
        return "" if self._finisher is None else self._finisher.words()


def _countable(engine: CoreEngine) -> bool:
    """Whether memory can be looked at: not where compiled code makes tensors that nothing else sees, nor where states
    are in files."""
    compiled = engine.device.type != "cuda" and bool(engine.compiler.compiled)
    assert engine.optimizer is not None
    return not compiled and not engine.optimizer.store.splits


class _Closing:
    """Closes a report when Python exits; the engine may be gone by then."""

    def __init__(self, report: Report) -> None:
        self._report = weakref.ref(report)

    def __call__(self) -> None:
        report = self._report()
        if report is not None and (words := report.words()) and not report.told:
            say(words)


def attach(engine: CoreEngine, folder: Path) -> Report | None:
    """Record ``engine``. Engines that do not train are passed over, and so are further ones of the process."""
    global _active
    if engine.optimizer is None:
        return None
    running = None if _active is None else _active()
    if running is not None and not running._closed:
        warn_once("the report is of the first engine of this process: another one that trains is not recorded")
        return None
    report = Report(engine, folder)
    engine.__dict__["_ds_report"] = report
    _active = weakref.ref(report)
    return report
