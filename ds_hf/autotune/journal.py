"""The file that a search keeps: Optuna's journal, in which each setting is a trial.

A search that was killed goes on from it, and workers on several machines share it: each says in its trial which setting
it has taken, and who it is.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from ds_hf.autotune.options import Options
from ds_hf.autotune.records import Record, record_of
from ds_hf.autotune.space import FreeKey, Setting, key_of

__all__ = ["JOURNAL", "STUDY", "Journal"]

JOURNAL = "journal.log"
STUDY = "ds_hf"
STARTUP = 4  # launches before Optuna's sampler has an opinion


class Journal:
    """The trials of all workers of a search."""

    def __init__(self, options: Options) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._ended: dict[int, Record] = {}  # by trial: nothing changes them, and they are often asked for
        path = options.results_dir / JOURNAL
        lock = JournalFileSymlinkLock(str(path))
        lock.acquire()
        try:
            _cut_torn_line(path)
        finally:
            lock.release()
        with _quiet():
            self.study = optuna.create_study(
                study_name=STUDY,
                storage=JournalStorage(JournalFileBackend(str(path), lock)),
                sampler=_sampler(options),
                direction="maximize" if options.metric.maximize else "minimize",
                load_if_exists=True,
            )

    def records(self) -> list[Record]:
        """All of them, in the order of their trials."""
        found = []
        for trial in self.study.get_trials(deepcopy=False):
            record = self._ended.get(trial.number) or record_of(trial)
            if record is not None:
                found.append(record)
                if trial.state.is_finished():
                    self._ended[trial.number] = record
        return found

    def taken(self) -> set[str]:
        """Keys of settings that have a record, or that a worker measures now."""
        running = (trial for trial in self.study.get_trials(deepcopy=False) if trial.state is TrialState.RUNNING)
        claimed = {trial.user_attrs["running"] for trial in running if "running" in trial.user_attrs}
        return claimed | {record.key for record in self.records()}

    def end_orphans(self) -> None:
        """Trials whose worker was killed."""
        for trial in self.study.get_trials(deepcopy=False):
            if _is_orphan(trial):
                self.study.tell(trial.number, state=TrialState.FAIL)

    def begin(self, setting: Setting, axes: Sequence[FreeKey]) -> optuna.Trial:
        """A trial that others leave alone from now on."""
        self.study.enqueue_trial(setting)
        trial = self._ask(axes)
        for name, value in _claim(setting).items():
            trial.set_user_attr(name, value)
        return trial

    def suggested(self, axes: Sequence[FreeKey]) -> Setting:
        """What Optuna's sampler would take."""
        trial = self._ask(axes)
        self.drop(trial)
        return dict(trial.params)

    def _ask(self, axes: Sequence[FreeKey]) -> optuna.Trial:
        with _quiet():
            trial = self.study.ask()
            for axis in axes:
                trial.suggest_categorical(axis.name, axis.values)
        return trial

    def drop(self, trial: optuna.Trial) -> None:
        """Nothing was measured."""
        self.study.tell(trial.number, state=TrialState.FAIL)

    def end(self, trial: optuna.Trial, kept: Mapping[str, Any], value: float | None) -> Record:
        """What came of a trial; ``value``: in the metric's unit, none where it failed."""
        for name, attribute in kept.items():
            trial.set_user_attr(name, attribute)
        self.study.tell(trial.number, value, state=_state(value))
        return self._record(trial.number)

    def add(
        self,
        setting: Setting,
        axes: Sequence[FreeKey],
        kept: Mapping[str, Any],
        value: float | None,
        *,
        ruled_out: bool,
    ) -> Record:
        """A whole trial at once: of the user's own file, or of a setting that cannot fit."""
        distributions: dict[str, Any] = {axis.name: CategoricalDistribution(axis.values) for axis in axes}
        state = TrialState.PRUNED if ruled_out else _state(value)
        self.study.add_trial(
            create_trial(state=state, value=value, params=setting, distributions=distributions, user_attrs=dict(kept))
        )
        return self._record(self.study.get_trials(deepcopy=False)[-1].number)

    def _record(self, number: int) -> Record:
        return next(record for record in self.records() if record.number == number)


def _state(value: float | None) -> TrialState:
    return TrialState.FAIL if value is None else TrialState.COMPLETE


def _sampler(options: Options) -> optuna.samplers.BaseSampler:
    if options.sampler == "random":
        return optuna.samplers.RandomSampler(seed=options.seed)
    with _quiet():
        return optuna.samplers.TPESampler(
            seed=options.seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna calls some of its own options experimental, each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _cut_torn_line(path: Path) -> None:
    """Optuna passes over a line that a killed process wrote half, and appends to it: then it reads neither."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 2**16)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)


def _claim(setting: Setting) -> dict[str, Any]:
    """Who runs a trial, so that others leave its setting alone, and find out when it was killed."""
    return {
        "running": key_of(setting),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "born": psutil.Process().create_time(),
    }


def _is_orphan(trial: FrozenTrial) -> bool:
    """Whether a running trial's worker was on this host and is gone."""
    kept = trial.user_attrs
    if trial.state is not TrialState.RUNNING or kept.get("host", socket.gethostname()) != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(kept.get("pid", -1)).create_time() != kept.get("born"))
    except (psutil.Error, ValueError):
        return True
