"""A whole search from a command line to files: check, search, confirm, write. Ctrl-C leaves the best so far."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ds_hf.autotune.command import Command, choose_launcher
from ds_hf.autotune.confirm import Contest, confirm
from ds_hf.autotune.earlier import forget, recall, remember
from ds_hf.autotune.journal import JOURNAL
from ds_hf.autotune.launches import Problem, Run
from ds_hf.autotune.lengths import with_option
from ds_hf.autotune.lr import (
    FindOptions,
    LrOptions,
    LrSearchError,
    event_line,
    find,
    fitting,
    sections,
    summary,
    total_steps_in,
    updates_of,
)
from ds_hf.autotune.options import Metric, Options
from ds_hf.autotune.page import code, section
from ds_hf.autotune.report import write_report
from ds_hf.autotune.result import Result, make_result
from ds_hf.autotune.space import check_names
from ds_hf.autotune.study import Search
from ds_hf.autotune.summary import headline, summary_lines, write_result
from ds_hf.autotune.trial import NOTE_NBYTES, kill_leftovers, processes_here
from ds_hf.autotune.view import View
from ds_hf.autotune.workers import try_workers
from ds_hf.config.load import examine
from ds_hf.config.types import Config
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.host import has_gpu
from ds_hf.measure.statistics import summarise
from ds_hf.printable import harmless
from ds_hf.regular_files import check_regular, read_object, read_regular, replace_file

__all__ = ["tune"]

SIGNATURE = "search.json"
LOCK = "own.lock"
LR_OVERTIME = 1.5
_TRIPPED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError)
UNNAMED_S = 10.0  # that a lock may take to get its writer's name


def tune(words: Sequence[str], options: Options, console: Console | None = None, run: Run | None = None) -> Result:
    """Find the fastest configuration for ``train.py <its arguments> --deepspeed ds_config.json``.

    Args:
        words: the script with its arguments, or a whole line of torchrun, ``accelerate launch``, deepspeed or trl.
        console: where to show progress; ``None`` shows nothing.
        run: runs a launch; tests give another one.

    Raises:
        ConfigError: the command, the file or an option is wrong.
        DsHfError: the script fails by itself, or nothing could be measured.
    """
    launcher, words = choose_launcher(words, options.launcher, options.processes)
    options = replace(options, launcher=tuple(launcher))
    command = Command.parse(words, launcher=options.launcher)
    config = _config(command)
    options = options.with_section(config)
    command = Command.parse(words, options.arg_mappings, options.launcher)
    if command.loads_as_it_is:  # another division in the file alone would be another global batch
        options = replace(options, fix=(*options.fix, "train_micro_batch_size_per_gpu"))
    _check(options)
    if options.metric is Metric.LENGTH:
        command = with_option(command, options.length_option)
    check_names(options)
    problem = Problem(command, config, options, options.processes or processes_here())
    view = View(console or Console(), options, quiet=console is None)
    resumed = _prepare_folder(problem)
    with _what_is_there(problem, resumed):
        search = Search(problem, view, run)
        try:
            return _search(search, view)
        finally:
            search.close()


def _search(search: Search, view: View) -> Result:
    interrupted = False
    try:
        view.begin()
        with view.shown():
            with _only_one_measures(search):
                search.begin()
                _begin_where_earlier_ones_ended(search, view)
            view.flops = search.flops
            search.search()
            search.close()
    except KeyboardInterrupt:
        if not hasattr(search, "model"):
            raise
        search.why_stopped, interrupted = "interrupted", True
    return _finish(search, view, interrupted=interrupted)


def _begin_where_earlier_ones_ended(search: Search, view: View) -> None:
    """Unless they are to be forgotten, or are of other lengths than this one's."""
    if search.launches.seeks_length:
        return
    if search.options.forget:
        forget(search)
        return
    known = recall(search)
    for setting, measured in known:
        search.model.observe(setting, measured, earlier=True)
    if known:
        several = "one of the settings" if len(known) == 1 else f"{len(known)} of the settings"
        view.say(f"earlier searches on this machine measured {several}: the search begins there (--forget: anew)")


def _finish(search: Search, view: View, *, interrupted: bool) -> Result:
    if not search.launches.seeks_length:
        remember(search)
    contest = Contest(search)
    contest.why_ended = "interrupted" if interrupted else "" if search.options.confirm else "--no-confirm"
    result = make_result(contest)
    paths = write_result(search, result)
    if search.options.confirm and not interrupted:
        try:
            with view.shown():
                confirm(contest)
        except KeyboardInterrupt:
            contest.why_ended = "interrupted"
        result = make_result(contest)
    if search.options.confirm and not interrupted:
        with suppress(KeyboardInterrupt), view.shown():
            try_workers(search, result)
    paths = write_result(search, result)
    if search.options.lr and not interrupted:
        with suppress(KeyboardInterrupt), view.shown():
            _find_learning_rate(search, result, view)
        paths = write_result(search, result)
    found = result.learning_rate
    rate = [] if found is None else [section("Learning rate", code(summary(found))), *sections(found)]
    paths["report"] = write_report(search, result, rate)
    result.paths = paths
    view.say("")
    view.say(headline(search, result))
    for line in summary_lines(search, result):
        view.say(line)
    for name, path in paths.items():
        view.say(f"  {name:<8} {path}")
    if found is not None:
        view.say(summary(found))
    view.say("start it with:\n  " + paths["command"].read_text("utf-8").strip())
    return result


def _find_learning_rate(search: Search, result: Result, view: View) -> None:
    """A range test with the result, in what is left of the budget; that it finds nothing does not undo the search."""
    _, point = result.best
    script = search.own.natural if result.confirmed is None else result.confirmed.natural
    step = max(point.seconds, summarise(list(script)).median if script else 0.0)
    left = search.launches.left
    start = min(record.seconds for record in search.launched()) / 2  # of the script, until it trains
    longest = LrOptions(total_steps=total_steps_in(result.words))
    options = fitting(longest, max(0.0, left - start), step)
    view.started(len(search.launched()), f"learning rate, some {updates_of(options):,} updates", None)
    if options.confirm_steps < longest.confirm_steps:
        view.say(
            f"  short trainings of {options.confirm_steps} updates instead of {longest.confirm_steps}, "
            "to stay in the budget: a rougher answer"
        )
    least = LR_OVERTIME * (updates_of(options) * step + start)  # the shortest search may need more than is left
    asked = FindOptions(options, search.options.results_dir / "lr", timeout_s=max(left, least))
    try:
        result.learning_rate = find(result.words, asked, lambda event: view.detailed(event_line(event)))
    except LrSearchError as error:
        view.say(str(error))


def _config(command: Command) -> Config:
    """The user's file, checked as training would."""
    source: Any = Path(command.config) if Path(command.config).exists() else command.config
    if command.config == "auto":
        raise ConfigError('--deepspeed auto leaves nothing to tune; give a preset ("zero2") or a file')
    return examine(source, world=None, allow_auto=True)


def _check(options: Options) -> None:
    if options.trials < 1:
        raise ConfigError("--trials must be 1 or more")
    if options.price is not None and not 0 < options.price < math.inf:
        raise ConfigError(f"--price must be more than 0, not {options.price}")
    fills = options.metric in (Metric.BATCH, Metric.LENGTH)
    if fills and options.memory_limit is None and not has_gpu():
        raise ConfigError(
            f"--goal {options.metric.value} needs --device-memory where there is no GPU: what is to hold it?"
        )
    if options.length_option and options.metric is not Metric.LENGTH:
        raise ConfigError("--length-option is for --goal longest-sequence")
    if options.low_batch and options.high_batch and options.low_batch > options.high_batch:
        raise ConfigError(f"the batch interval {options.low_batch}:{options.high_batch} is empty")
    if options.low_micro > options.high_micro:
        raise ConfigError(f"the micro-batch interval {options.low_micro}:{options.high_micro} is empty")


@contextmanager
def _what_is_there(problem: Problem, resumed: bool) -> Iterator[None]:
    """What trips over the records of an earlier run is their fault."""
    try:
        yield
    except _TRIPPED as error:
        if not resumed or isinstance(error, DsHfError):
            raise
        raise ConfigError(
            f"{problem.options.results_dir / JOURNAL}: what it holds of earlier trials cannot be read "
            f"({type(error).__name__}: {error!s:.200}): --force starts again, or give another --output"
        ) from harmless(error)


def _prepare_folder(problem: Problem) -> bool:
    """Make the results folder; refuse one that belongs to another search. Whether one of this search was there.

    Raises:
        ConfigError: it cannot be written, or holds something else.
    """
    folder = problem.options.results_dir
    fix = "give another --output"
    try:
        if problem.options.overwrite and os.path.lexists(folder / JOURNAL):
            kill_leftovers(folder / "trials")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch(exist_ok=False)
        probe.unlink()
        _check_journal(folder / JOURNAL)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error}; {fix}") from None
    here = _signature(problem)
    noted = folder / SIGNATURE
    if os.path.lexists(noted):
        try:
            there = read_object(noted)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{noted} is not what a search writes ({error!s:.200}): --force starts again, or {fix}"
            ) from harmless(error)
        different = [name for name in here if there.get(name) != here[name]]
        if different:
            raise ConfigError(
                f"{folder} holds a search of something else ({', '.join(different)} differ): "
                f"--force starts again (from Python force=True), or {fix}"
            )
        return (folder / JOURNAL).exists()
    if any(folder.iterdir()) and not (folder / JOURNAL).exists() and any(folder.glob("trials/*")):
        raise ConfigError(f"{folder} has files of something else; {fix}")
    replace_file(noted, json.dumps(here, indent=2) + "\n")
    return (folder / JOURNAL).exists()


def _check_journal(journal: Path) -> None:
    """Optuna opens it by its path, to read and to write: through a link elsewhere, and a pipe for ever.

    Raises:
        OSError: it is not a file that lies there itself.
    """
    if os.path.lexists(journal):
        if journal.is_symlink():
            raise OSError(errno.EMLINK, f"{journal} is a link", str(journal))
        check_regular(journal)


def _signature(problem: Problem) -> dict[str, Any]:
    """What must be equal for two runs to be one search."""
    options, command = problem.options, problem.command
    return {
        "script": list(command.script),
        "arguments": command.signature,
        "configuration": problem.config.resolved,
        "metric": options.metric.value,
        "processes": problem.processes,
        "launcher": list(options.launcher),
        "memory_limit": options.memory_limit,
        "tune": sorted(options.tune),
        "fix": sorted(options.fix),
        "batch": [options.low_batch, options.high_batch],
        "micro": [options.low_micro, options.high_micro],
    }


@contextmanager
def _only_one_measures(search: Search) -> Iterator[None]:
    """Of several workers one measures the user's file; the others wait for what it finds."""
    lock = search.options.results_dir / LOCK
    end = time.monotonic() + search.options.trial_timeout
    while True:
        try:
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            if _stale(lock, search.options.trial_timeout) or time.monotonic() > end:
                _remove(lock)
            time.sleep(0.5)
    try:
        os.write(handle, f"{os.uname().nodename} {os.getpid()}".encode())
        os.close(handle)
        yield
    finally:
        lock.unlink(missing_ok=True)


def _remove(lock: Path) -> None:
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:  # a folder
        raise ConfigError(f"cannot remove {lock}: {error.strerror}; move it away, or give another --output") from None


def _stale(lock: Path, timeout: float) -> bool:
    """Whether the worker that holds the lock is gone."""
    with suppress(OSError, ValueError):
        age = time.time() - lock.lstat().st_mtime
        with suppress(OSError, ValueError):
            host, pid = read_regular(lock, NOTE_NBYTES).decode().split()
            if host == os.uname().nodename:
                return not Path(f"/proc/{int(pid)}").exists()
            return age > timeout
        return age > UNNAMED_S  # a worker that was killed before it had written its name
    return False
