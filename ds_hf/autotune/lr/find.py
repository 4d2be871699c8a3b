"""Runs a user's unchanged script under torchrun and has its engine search a learning rate: ``find``.

The script is told by one environment variable that names a job file (``script.py`` of
``ds_hf.engine.observe.probes.learning_rate`` answers), and ends by itself, before it saves anything. If it trains on
fewer batches than the search wants, it is started again for a search that they suffice for. Everything that it printed
is in ``log.txt``; nothing of it outlives the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.autotune.command import found_program
from ds_hf.autotune.lr.summary import event_line
from ds_hf.errors import DsHfError
from ds_hf.host import has_gpu
from ds_hf.lr import LrOptions, LrResult
from ds_hf.lr.budget import for_batches, for_fed_batches
from ds_hf.measure.saving import LR_ENV
from ds_hf.printable import harmless
from ds_hf.processes import end_program, start_program
from ds_hf.regular_files import open_regular, read_object, read_regular, replace_file

__all__ = ["FindOptions", "LrSearchError", "find", "launch_command", "total_steps_in"]

RESULT = "lr_result.json"
TAIL_LINES = 25
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "ds-hf")
GRACE_S = 10.0  # between being asked to end and being killed
LAST_S = 5.0  # of the budget, in which the script puts its answer down and ends
STARTS = 3  # of the script, each for a shorter search
SILENT = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}  # no runs there of a training that does not happen

OnEvent = Callable[[dict[str, Any]], None]


class LrSearchError(DsHfError):
    """No learning rate was found; the text says why and shows the end of what the script printed."""


@dataclass(frozen=True)
class FindOptions:
    """How to launch.

    Attributes:
        search: what is searched.
        output: folder for ``lr_result.json`` and ``log.txt``.
        processes: of one machine; ``None`` for one a GPU, or one without.
        timeout_s: seconds for everything: the search is made to end before, with the best so far.
        env: further environment variables.
    """

    search: LrOptions = field(default_factory=LrOptions)
    output: Path = Path("ds_hf_lr")
    processes: int | None = None
    timeout_s: float = 3600.0
    env: dict[str, str] = field(default_factory=dict)


def find(command: Sequence[str], options: FindOptions | None = None, on_event: OnEvent | None = None) -> LrResult:
    """Launch ``command`` (``train.py`` and its arguments, or a launcher and all that follows) and return the result.

    Args:
        on_event: called with each step of the search as it happens.

    Raises:
        LrSearchError: the script failed, ended too early, took too long, or no rate works.
    """
    options = options or FindOptions()
    full = launch_command(command, options.processes)
    deadline = time.monotonic() + options.timeout_s
    search: LrOptions | None = options.search
    notes: list[str] = []
    why = ""
    for start in range(1, STARTS + 1):
        if search is None or time.monotonic() >= deadline:
            break
        found = _launch(full, options, search, on_event, deadline - time.monotonic())
        if isinstance(found, LrResult):
            return _noted(found, notes, options.output / RESULT)
        why = _why_short(found)
        search, notes = _shorter(search, found, start), [f"a shorter search: {why}"]
        if search is not None and start < STARTS and on_event is not None:
            on_event({"phase": "short", "why": why})
    raise LrSearchError(
        f"{why}, too few for a search; let it train longer (--max_steps, --num_train_epochs)\n"
        f"{_tail(options.output / 'log.txt')}"
    )


def _launch(
    full: list[str], options: FindOptions, search: LrOptions, on_event: OnEvent | None, timeout_s: float
) -> LrResult | dict[str, Any]:
    """One run of the script: the result, or how many batches it had where these did not suffice."""
    folder = options.output.absolute()
    job, progress, result, log = (folder / name for name in ("job.json", "progress.jsonl", RESULT, "log.txt"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (progress, result, log):
            stale.unlink(missing_ok=True)
        content = {"options": search.to_dict(), "result": str(result), "progress": str(progress),
                   "deadline": time.time() + timeout_s - min(LAST_S, 0.1 * timeout_s)}  # fmt: skip
        replace_file(job, json.dumps(content, indent=1) + "\n")
        output = log.open("x", encoding="utf-8")
    except OSError as error:
        raise LrSearchError(
            f"cannot write into {folder}: {error.strerror}; choose another folder (--output)"
        ) from error
    env = {**os.environ, **SILENT, **options.env, LR_ENV: str(job)}
    tail = _Tail(progress, on_event)

    def over() -> bool:
        tail()
        return result.exists()

    with output:
        code = _run(full, env, output, timeout_s, over)
    return _read(result, log, code, options.timeout_s, tail.last)


def _shorter(search: LrOptions, short: dict[str, Any], start: int) -> LrOptions | None:
    """What the batches of the run before suffice for."""
    updates = short["micro_batches"] // short["accumulation"]
    return for_fed_batches(search, updates // start) if short["feeding"] else for_batches(search, updates)


def _why_short(short: dict[str, Any]) -> str:
    updates, before = short["micro_batches"] // short["accumulation"], short["before"]
    came = "it ended" if before is None else f"it came to {before}, before which it was stopped"
    return f"the script trained on {updates} batch{'' if updates == 1 else 'es'} until {came}"


def _noted(found: LrResult, notes: list[str], result: Path) -> LrResult:
    noted = dataclasses.replace(found, notes=(*found.notes, *notes))
    replace_file(result, json.dumps(noted.to_dict(), indent=1) + "\n")
    return noted


def launch_command(command: Sequence[str], processes: int | None = None) -> list[str]:
    """``command`` under torchrun, unless it begins with a launcher already.

    Raises:
        LrSearchError: there is no command, or no such script.
    """
    if not command:
        raise LrSearchError("no script: ds-hf lr-find [options] train.py <its arguments> --deepspeed ds_config.json")
    if Path(command[0]).name in LAUNCHERS:
        return _with_this_python(command)
    if not Path(command[0]).is_file():
        raise LrSearchError(f"there is no script {command[0]}")
    count = str(processes) if processes is not None else "gpu" if has_gpu() else "1"
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *command]


def _with_this_python(command: Sequence[str]) -> list[str]:
    """``torchrun`` and ``python`` of this environment, which need not be the first in the path."""
    if command[0].startswith("python"):
        return [sys.executable, *command[1:]]
    if command[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    return found_program(command)


def total_steps_in(command: Sequence[str]) -> int | None:
    """``--max_steps`` of the script, if it is given."""
    for index, word in enumerate(command):
        name, _, value = word.partition("=")
        if name in ("--max_steps", "--max-steps"):
            text = value or (command[index + 1] if index + 1 < len(command) else "")
            return int(text) if text.isdecimal() and int(text) > 0 else None
    return None


class _Tail:
    """Passes on the lines that appear in a file."""

    def __init__(self, path: Path, on_event: OnEvent | None) -> None:
        self.path, self.on_event = path, on_event
        self.offset = 0
        self.last: dict[str, Any] | None = None

    def __call__(self) -> None:
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                text = file.read()
        except OSError:  # not there yet
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # what a killed process wrote half
                self.last = json.loads(line)
                if self.on_event is not None:
                    self.on_event(self.last)


def _run(
    command: list[str], env: dict[str, str], output: Any, timeout_s: float, over: Callable[[], bool]
) -> int | None:
    """Exit code of the command; ``None`` when its time was over. It is gone afterwards, also after Ctrl-C.

    Once ``over`` says so it has a short time to end: a process that stopped before saving leaves others that wait.
    """
    try:
        process = start_program(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    except OSError as error:
        raise LrSearchError(f"cannot start {command[0]}: {error.strerror}") from error
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if over():
                deadline = min(deadline, time.monotonic() + GRACE_S)
        over()
        return process.poll()
    finally:
        end_program(process, GRACE_S)


def _read(
    result: Path, log: Path, code: int | None, timeout_s: float, last: dict[str, Any] | None = None
) -> LrResult | dict[str, Any]:
    content: dict[str, Any] = {}
    if os.path.lexists(result):
        try:
            content = read_object(result)
            if "result" in content:
                return LrResult.from_dict(content["result"])
            short = _short(content.get("short"))
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
            raise LrSearchError(
                f"{result} is not what the script's engine writes ({type(error).__name__}: {error!s:.200}): "
                f"does another program write there?\n{_tail(log)}"
            ) from harmless(error)
        if short and (code == 0 or short["before"] is not None):
            result.unlink()
            return short
    if "error" in content:
        why = str(content["error"])
    elif code is None:
        came = "it had not trained on a batch" if last is None else f"it was at: {event_line(last)}"
        raise LrSearchError(
            f"the {timeout_s:g} s of the budget were over before there was anything to say; {came}. Give it more "
            f"(--budget), or smaller --steps; what the script printed is in {log}"
        )
    elif code == 0:
        why = "the script ended well, but never trained with a ds_hf engine: does it use --deepspeed or initialize()?"
    else:
        why = f"the script failed with exit code {code}"
    raise LrSearchError(f"{why}\n{_tail(log)}")


def _short(found: Any) -> dict[str, Any]:
    """Of a training that was too short; empty where it was not."""
    if not found:
        return {}
    numbers = {name: int(found[name]) for name in ("micro_batches", "accumulation")}
    if numbers["accumulation"] < 1:
        raise ValueError(f"accumulation is {numbers['accumulation']}")
    return {**numbers, "before": found["before"], "feeding": bool(found["feeding"])}


def _tail(log: Path) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = read_regular(log).decode("utf-8", "replace").rstrip().splitlines()
    return (
        f"the end of {log}:\n" + "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        if lines
        else f"{log} is empty"
    )
