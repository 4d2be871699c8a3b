"""One launch: the user's script in processes of its own, watched until it has measured, failed, hung or run too long.

Whatever happens is a ``LaunchOutcome`` with a reason in words and never an exception; nothing that it started stays
behind.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ds_hf.autotune.load import LoadMeter, gpu_share
from ds_hf.measure.protocol import TRIAL_ENV, TrialRequest, further_file, read_events
from ds_hf.processes import start_program
from ds_hf.regular_files import read_regular, replace_file

__all__ = ["Launch", "LaunchOutcome", "Point", "Runner", "kill_leftovers", "last_error", "launch_words", "samplers"]

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0  # of processes that go on when the first one has measured everything
TAIL_LINES = 40
NOTE_NBYTES = 1024  # of a process that a launch began
LIBRARIES_THAT_UPLOAD = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "", "COMET_MODE": "disabled"}

Watch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Point:
    """What was measured for one micro-batch: median seconds of a step with its interval, peak bytes.

    Once compared (``Launches``), seconds are those of the machine as it was in the first launch.

    Attributes:
        slowdown: how many times as long the same work took here. error: of ``seconds`` altogether, in its logarithm.
        data: processes that read different samples.
        length: tokens of its sequences, where the longest are wanted.
    """

    micro: int
    accumulation: int
    seconds: float
    low: float
    high: float
    peak: int
    optimizer_seconds: float = 0.0
    steps: int = 0
    slowdown: float = 1.0
    error: float = 0.0
    data: int = 1
    length: int = 0

    @property
    def samples(self) -> int:
        """Of one step, on all processes."""
        return self.micro * self.accumulation * self.data


@dataclass
class LaunchOutcome:
    """How a launch ended.

    Attributes:
        kind: "ok", "oom", "crash", "hang", "timeout", "no engine" or "no steps"; "pruned" in older journals.
        reason: in words, for people.
        points: what was measured, whatever happened afterwards.
        too_large: micro-batches that ran out of memory.
        natural: seconds of the script's own steps; waits: how many of them for the DataLoader.
        natural_error: of their median against the first launch's, in its logarithm.
        events: everything else that the engine said, by event.
        tail: the end of the output.
    """

    kind: str
    reason: str = ""
    points: list[Point] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)
    natural: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    natural_error: float = 0.0
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tail: str = ""
    seconds: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Sort an event in."""
        kind = event["event"]
        if kind == "point" and event["outcome"] == "ok":
            names = ("micro", "accumulation", "seconds", "low", "high", "peak", "optimizer_seconds", "steps")
            data, length = samplers(self.events.get("facts", {})), event.get("length", 0)
            point = Point(**{name: event[name] for name in names}, data=data, length=length)
            kept = [
                each for each in self.points if (each.micro, each.accumulation) != (point.micro, point.accumulation)
            ]
            self.points = [*kept, point]
        elif kind == "point" and event["outcome"] == "oom":
            self.too_large.append(event["micro"])
        elif kind == "step" and event["kind"] == "natural":
            self.natural.append(event["seconds"])
            self.waits.append(event.get("wait", 0.0))
        elif kind == "machine" and event.get("phase"):
            self.events[f"machine {event['phase']}"] = event
        elif kind == "note":
            self.notes.append(event["text"])
            if event.get("resizable") is False:
                self.events["not resizable"] = event
        elif kind != "step":
            self.events[kind] = event

    @property
    def stays(self) -> bool:
        """Whether its processes wait for a further request, also after sizes of which none fits."""
        return self.kind in ("ok", "oom") and bool(self.events.get("done", {}).get("stays"))

    @property
    def resizable(self) -> bool:
        """Whether the engine could run other batch sizes than the script's."""
        return "not resizable" not in self.events


def samplers(facts: Mapping[str, Any]) -> int:
    """Processes that read different samples, by the event "facts"; of older journals, all of them."""
    return int(facts.get("data") or facts.get("world_size") or 1)


@dataclass(frozen=True)
class Launch:
    """What to start: words, the folder for its files, and the limits in seconds.

    Attributes:
        goes_on: only keys differ from the launch before that its processes can change, if they have stayed.
    """

    words: Sequence[str]
    folder: Path
    request: TrialRequest
    timeout: float
    stall: float
    goes_on: bool = False


def processes_here() -> int:
    """One a GPU, or one."""
    import torch  # only here: the command line starts without it

    return max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 1


def launch_words(launcher: Sequence[str], processes: int, words: Sequence[str]) -> list[str]:
    """``words`` under torchrun, or behind the user's own launcher."""
    if launcher:
        return [*launcher, *words]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*run, *words]


class Runner:
    """Runs launches to their ends, one after the other; called as tests' worlds are.

    Processes whose launch ``stays`` wait for the next one. If that ``goes_on`` it is theirs, else they are ended.
    """

    def __init__(self) -> None:
        self._staying: _Started | None = None

    def __call__(self, launch: Launch, watch: Watch | None = None) -> LaunchOutcome:
        """Run one.

        Args:
            watch: is told every event.
        """
        launch.folder.mkdir(parents=True, exist_ok=True)
        replace_file(launch.folder / "command.txt", shlex.join(launch.words) + "\n")
        Path(launch.request.events).unlink(missing_ok=True)
        outcome = LaunchOutcome("ok")
        start = time.monotonic()
        started, self._staying = self._staying, None
        if started is not None and not (launch.goes_on and started.alive):
            started.end()
            started = None
        if started is None:
            started = _Started(launch, gpu_share())
        else:
            started.ask(launch.request)
        outcome.events["load"] = {"gpu": started.share}
        stays = False
        try:
            ended = _watch(started, launch, outcome, watch)
            stays = ended == "stays"
        finally:
            if not stays:
                started.end()
        for event, _ in _rest(launch, outcome):
            outcome.take(event)
        outcome.seconds = time.monotonic() - start
        outcome.tail = _tail(started.log)
        _judge(outcome, ended, started.process.returncode or 0, launch, started.log)
        if stays:
            self._staying = started
        return outcome

    def close(self) -> None:
        """End what waits."""
        started, self._staying = self._staying, None
        if started is not None:
            started.end()


class _Started:
    """The processes of a launch, where their output goes, and how busy the GPUs were before them."""

    def __init__(self, launch: Launch, share: float | None) -> None:
        self.share = share
        self.folder = launch.folder.resolve()
        self.log = self.folder / "output.log"
        self.number = launch.request.further
        launch.request.write(self.folder / "request.json")
        for old in self.folder.glob("further-*.json"):  # of a search that was killed
            old.unlink()
        self.log.unlink(missing_ok=True)  # it may be a link
        with self.log.open("xb") as output:
            self.process = start_program(
                launch.words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **LIBRARIES_THAT_UPLOAD,
                    "PYTHONFAULTHANDLER": "1",
                    TRIAL_ENV: str(self.folder / "request.json"),
                },
            )
        born = psutil.Process(self.process.pid).create_time()
        replace_file(self.folder / "pid", f"{self.process.pid} {born}")

    @property
    def alive(self) -> bool:
        """Whether they can be asked."""
        return self.process.poll() is None

    def ask(self, request: TrialRequest) -> None:
        """A further request."""
        request.write(further_file(self.folder / "request.json", self.number))
        self.number += 1

    def end(self) -> None:
        """Them, and all that they started."""
        _end(self.folder, self.process.pid, stacks=False)
        self.process.wait()
        (self.folder / "pid").unlink(missing_ok=True)


def _watch(started: _Started, launch: Launch, outcome: LaunchOutcome, watch: Watch | None) -> str:
    """Read events until the process ends or must be ended, or has measured everything and stays; says which."""
    events, log, process = Path(launch.request.events), started.log, started.process
    start = life = time.monotonic()
    offset = written = 0
    load = LoadMeter(process.pid)
    while True:
        running = process.poll() is None
        load.sample()
        outcome.events["load"] = {**outcome.events.get("load", {}), **load.result()}
        for event, behind in list(read_events(events, offset)):
            offset = behind
            outcome.take(event)
            life = time.monotonic()
            if watch is not None:
                watch(event)
        outcome.events["offset"] = {"offset": offset}
        if running and outcome.events.get("done", {}).get("stays"):
            return "stays"
        if not running or ("done" in outcome.events and time.monotonic() - life > GRACE_SECONDS):
            return "ended"
        if log.stat().st_size != written:
            written, life = log.stat().st_size, time.monotonic()
        now = time.monotonic()
        if now - start > launch.timeout or now - life > launch.stall:
            _end(started.folder, process.pid, stacks=True)
            return "timeout" if now - start > launch.timeout else "hang"
        time.sleep(POLL_SECONDS)


def _rest(launch: Launch, outcome: LaunchOutcome) -> list[tuple[dict[str, Any], int]]:
    offset = outcome.events.pop("offset", {}).get("offset", 0)
    return list(read_events(Path(launch.request.events), offset))


def _judge(outcome: LaunchOutcome, ended: str, code: int, launch: Launch, log: Path) -> None:
    """Set ``kind`` and ``reason``."""
    if ended in ("timeout", "hang"):
        limit = launch.timeout if ended == "timeout" else launch.stall
        did = "took longer than" if ended == "timeout" else "was silent for"
        outcome.kind, outcome.reason = ended, f"{did} {limit:g} s; its stacks are in {log}"
    elif "facts" not in outcome.events:
        _judge_without_engine(outcome, code)
    elif "done" in outcome.events and (outcome.points or outcome.natural):
        outcome.kind = "ok"
    elif outcome.too_large and not outcome.points:
        outcome.kind, outcome.reason = "oom", f"out of memory at micro-batch {min(outcome.too_large)}"
    elif code != 0 and _says_out_of_memory(outcome.tail):
        outcome.kind, outcome.reason = "oom", last_error(outcome.tail)
    elif code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "Signal 9 (SIGKILL)" in outcome.tail:
        outcome.kind, outcome.reason = "oom", "killed by the system (SIGKILL): most likely host memory ran out"
    elif code != 0:
        outcome.kind, outcome.reason = "crash", f"exit code {code}: {last_error(outcome.tail)}"
    elif not outcome.points and not outcome.natural:
        outcome.kind = "no steps"
        outcome.reason = "the script made an engine, but ended before it had trained enough steps to measure"


def _judge_without_engine(outcome: LaunchOutcome, code: int) -> None:
    if code == 0:
        outcome.kind = "no engine"
        outcome.reason = (
            "the script ended without an error, but never made an engine "
            "(deepspeed.initialize, or a Trainer that trains)"
        )
    elif code != 0 and _says_out_of_memory(outcome.tail):
        outcome.kind, outcome.reason = "oom", last_error(outcome.tail)
    else:
        outcome.kind, outcome.reason = "crash", f"exit code {code}: {last_error(outcome.tail)}"


def _says_out_of_memory(text: str) -> bool:
    return "OutOfMemoryError" in text or "out of memory" in text


def last_error(text: str) -> str:
    """The line that names the error: the last of a traceback of the script, or of argparse."""
    own = text.split("torch.distributed.elastic", 1)[0]
    found = re.findall(
        r"^(?:\[rank\d+\]:\s*)?((?:[\w.]*(?:Error|Exception|Fault|Exit|Interrupt)\b.*)|(?:[\w.-]+: error: .*))$",
        own,
        re.M,
    )
    lines = [line for line in own.splitlines() if line.strip()]
    return (found[-1] if found else lines[-1] if lines else "it printed nothing").strip()[:500]


def _tail(path: Path) -> str:
    """The end of the output, without torchrun's own summary of a failure."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 60_000))
        text = file.read().decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if not line.startswith(("USDT:", "W1", "E1", "I1"))]
    for index, line in enumerate(lines):
        if "ChildFailedError" in line or "/bin/torchrun" in line:
            start = next((i for i in range(index, -1, -1) if lines[i].startswith("Traceback")), index)
            lines = lines[:start]
            break
    return "\n".join(lines[-TAIL_LINES:])


def _end(folder: Path, pid: int, *, stacks: bool) -> None:
    """End a launch and all that it started; with ``stacks`` the workers write theirs first."""
    family = _family(folder, pid)
    if stacks:
        for process in family:
            with suppress(psutil.Error):
                if process.pid != pid:
                    process.send_signal(signal.SIGABRT)
        psutil.wait_procs(family, timeout=3)
    for process in family:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def _family(folder: Path, pid: int) -> list[psutil.Process]:
    """The launched process and every one that inherited its mark: workers have sessions of their own, and may be
    orphans."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = process.environ().get(TRIAL_ENV)  # of a further request, where they began later
            if process.pid == pid or (mark and Path(mark).parent == folder):
                found.append(process)
    return found


def kill_leftovers(folder: Path) -> None:
    """End what a killed search left running: processes that its notes name, if they are still the same ones."""
    for note in folder.glob("*/pid"):
        if folder.is_symlink() or note.parent.is_symlink():  # what lies elsewhere is not of this search
            continue
        with suppress(OSError, ValueError, psutil.Error):
            pid, created = read_regular(note, NOTE_NBYTES).decode().split()
            if psutil.Process(int(pid)).create_time() == float(created):
                _end(note.parent, int(pid), stacks=False)
        with suppress(OSError):  # a folder
            note.unlink()
