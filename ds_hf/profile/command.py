"""Records some steps of a user's script: its own command and file, with ``ds_hf.report`` in it."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hf.autotune.command import Command, choose_launcher, found_program
from ds_hf.autotune.trial import launch_words, processes_here
from ds_hf.config import load_config
from ds_hf.engine.observe.report.files import rank_path, require_writable
from ds_hf.errors import DsHfError
from ds_hf.measure.saving import PROFILE_ENV
from ds_hf.processes import end_program, start_program
from ds_hf.profile.load import SOURCE, Rank, StepRecord, read_run
from ds_hf.profile.report import CONFIG
from ds_hf.profile.verdict import NAMES, Verdict, changed_file, milliseconds
from ds_hf.regular_files import TEXT_NBYTES, read_object, read_regular, replace_file

__all__ = ["Profiled", "apply_to", "line_of", "record"]

POLL_S = 0.2
LOG = "log.txt"
TAIL = 25  # lines of the script's output that an error shows


@dataclass(frozen=True)
class Profiled:
    """How the script ended: its exit code, and the command as it was read."""

    command: Command
    code: int


def record(
    words: Sequence[str],
    folder: Path,
    *,
    steps: int | None,
    processes: int | None,
    launcher: Sequence[str] = (),
    budget: float,
    show: Callable[[str], None],
) -> Profiled:
    """Start the script and wait for so many steps, or its end. Ctrl-C ends it; what was recorded stays.

    Args:
        steps: ``None``: the whole training, which then saves what it saves.
        words: the script with its arguments, or a whole line of torchrun, ``accelerate launch`` or deepspeed.
        processes: on this host; ``None``: one a GPU, or one. launcher: words in place of torchrun.
        show: told of each step in a line.

    Raises:
        ConfigError: the command or its configuration is wrong, or nothing can be written into ``folder``.
        DsHfError: the script ended before any step was recorded; with the end of its output.
    """
    launcher, words = choose_launcher(words, launcher, processes)
    command = Command.parse(words, launcher=launcher)
    folder = require_writable(folder, "--output")
    for old in folder.glob("rank_*.jsonl"):
        old.unlink()
    written = _written(command.config)
    source = {"config": str(Path(command.config).absolute()), "written": written}
    replace_file(folder / SOURCE, json.dumps(source))
    config = folder / "ds_config.json"
    replace_file(config, json.dumps(_recording(written, folder), indent=2) + "\n")
    environment = {**os.environ, **({PROFILE_ENV: str(steps)} if steps is not None else {})}
    started = launch_words(found_program(launcher), processes or processes_here(), command.words(config))
    (folder / LOG).unlink(missing_ok=True)  # it may be a link
    with (folder / LOG).open("xb") as log:
        process = start_program(started, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code = _follow(process, folder, budget, show)
        finally:
            end_program(process)
    if not any(rank.steps for rank in _ranks(folder)):
        tail = (folder / LOG).read_text("utf-8", "replace").splitlines()[-TAIL:]
        raise DsHfError(
            "\n".join([f"no step was recorded: the script ended with code {code}; its output ends with", *tail])
        )
    return Profiled(command, code)


def _written(source: str) -> dict[str, Any]:
    if Path(source).is_file():
        return _read(source)
    return load_config(source, allow_auto=True, check_batch=False).resolved


def _recording(written: dict[str, Any], folder: Path) -> dict[str, Any]:
    tree = copy.deepcopy(written)
    section = tree.setdefault("ds_hf", {})
    section["report"], section["report_steps"] = str(folder), "all"
    return tree


def _read(source: str) -> dict[str, Any]:
    load_config(source, allow_auto=True, check_batch=False)  # its faults, with lines; the script knows the processes
    from ds_hf.config.parse import parse

    found: dict[str, Any] = parse(read_regular(source, TEXT_NBYTES).decode("utf-8"), source).value
    return found


def _follow(process: subprocess.Popen[bytes], folder: Path, budget: float, show: Callable[[str], None]) -> int:
    until, place, rank = time.monotonic() + budget, 0, None
    path = rank_path(folder, 0)
    while True:
        code = process.poll()
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    place += len(line)
                    rank = _take(rank, json.loads(line), show)
        if code is not None:
            return code
        if time.monotonic() > until:
            return -signal.SIGTERM
        time.sleep(POLL_S)


def _take(rank: Rank | None, line: dict[str, Any], show: Callable[[str], None]) -> Rank | None:
    from ds_hf.engine.observe.report.spans import Key, Span

    if rank is None:
        return Rank(0, line)
    if "keys" in line:
        rank.keys += [Key(*key) for key in line["keys"].values()]
    elif "step" in line:
        spans = [Span(key, start * 1e-6, seconds * 1e-6, depth) for key, start, seconds, depth in line["spans"]]
        step = StepRecord(line["step"], line["begin"], line["seconds"], line["samples"], line["tokens"], spans, [])
        show(line_of(rank, step))
    return rank


def line_of(rank: Rank, step: StepRecord) -> str:
    """One step of one rank in a line."""
    kinds: dict[str, float] = {}
    for key, seconds in rank.own_times(step).items():
        kinds[key.kind] = kinds.get(key.kind, 0.0) + seconds
    largest = sorted(kinds.items(), key=lambda item: -item[1])[:4]
    words = ", ".join(f"{NAMES[kind]} {seconds / step.seconds:.0%}" for kind, seconds in largest if step.seconds)
    rate = f", {step.tokens / step.seconds:,.0f} tokens/s a rank" if step.tokens and step.seconds else ""
    return f"step {step.number}: {milliseconds(step.seconds)}{rate} ({words})"


def _ranks(folder: Path) -> list[Rank]:
    with suppress(DsHfError):
        return read_run(folder).ranks
    return []


def apply_to(folder: Path, verdict: Verdict) -> Path:
    """Put the suggested changes into the user's own file, which stays beside it as ``NAME.before``.

    Raises:
        DsHfError: there is nothing to change, or it is not known which file it was.
        OSError: it cannot be written.
    """
    if not verdict.changes:
        raise DsHfError("nothing to apply: no finding has a change of the file")
    target = _source(folder, verdict)
    if target is None:
        raise DsHfError(f"the run had no file of its own: the changed configuration is {folder / CONFIG}")
    before = target.with_name(f"{target.name}.before")
    before.unlink(missing_ok=True)  # a link is not followed
    shutil.copy2(target, before)
    changed = changed_file(_read(str(target)), verdict.analysis.run.header["config"], verdict.changes)
    replace_file(target, json.dumps(changed, indent=2) + "\n")
    return target


def _source(folder: Path, verdict: Verdict) -> Path | None:
    """The file that the run was configured by."""
    known = folder / SOURCE
    named = read_object(known)["config"] if known.is_file() else verdict.analysis.run.header["source"]
    return Path(named) if Path(named).is_file() else None
