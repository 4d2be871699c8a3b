"""Notes when spans begin and end, and adds each recorded step to the rank's file.

A mark is a point of time with the key of the span that begins there, or -1 where the innermost one ends. On the CPU it
is the host's clock. On a GPU it is an event on the stream on which the model computes: spans are device time, in which
a wait for a communication stream is as long as it is exposed; they are read when the device has come past them, so the
host waits for nothing. Marks on communication streams are kept beside, as what ran there.

A step is from the end of one to the end of the next. Which steps are recorded depends on their number alone, so that
all ranks record the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ds_hf.engine.observe.monitor.late import LateCopy, later
from ds_hf.engine.observe.report.files import ReportFile
from ds_hf.engine.observe.report.spans import Key, Span

__all__ = ["DeviceRecorder", "RecordedStep", "Recorder", "is_sampled"]

CLOSE = -1
_NOTHING = nullcontext()
_OWN = Key("report", "what was recorded, into its file")
FIRST, OFTEN = 16, 4096  # steps: all of the first, then one of 16, later one of 256


def is_sampled(number: int) -> bool:
    """Whether the step with this number, from 1, is recorded where not all are."""
    return number <= FIRST or number % (16 if number <= OFTEN else 256) == 0


@dataclass
class RecordedStep:
    """One recorded step.

    Attributes:
        number: of the engine, from 1. begin: seconds on the rank's clock. seconds: from the end of the last step.
        samples, tokens: of this rank; tokens ``None`` where inputs have none.
        spans: on the host, or the stream of the computation; ``beside``: on communication streams.
        starved: share of the marks at which a GPU had nothing left to do.
    """

    number: int
    begin: float
    seconds: float
    samples: int
    tokens: int | None
    spans: list[Span]
    beside: list[Span] = field(default_factory=list)
    starved: float = 0.0

    def line(self) -> dict[str, Any]:
        """As the file has it."""
        return {
            "step": self.number,
            "begin": self.begin,
            "seconds": self.seconds,
            "samples": self.samples,
            "tokens": self.tokens,
            "starved": round(self.starved, 4),
            "spans": [_rounded(span) for span in self.spans],
            "beside": [_rounded(span) for span in self.beside],
        }


def _rounded(span: Span) -> tuple[int, float, float, int]:
    """In microseconds."""
    return span.key, round(span.start * 1e6, 1), round(span.seconds * 1e6, 1), span.depth


class Looks(Protocol):
    """What looks at memory in the marks of a step."""

    def before(self, key: Key) -> None:
        """A span of ``key`` begins."""

    def after(self) -> None:
        """One has ended."""

    def guard(self) -> AbstractContextManager[None]:
        """Around each phase."""


class Recorder:
    """Records the steps of one engine on a CPU.

    Args:
        file: of this rank.
        every: record all steps.
        clock: nanoseconds; tests give their own.

    Attributes:
        on: the present step is recorded.
        phase: "forward", "backward" or "", as far as the engine drives them.
        keys: those that were used so far, by number.
        listeners: told of each step that is complete.
        turn: grows with each step: a span that a step's end has closed is not closed again.
        memory: looks at memory wherever a span begins or ends, ``None`` in most steps.
    """

    def __init__(self, file: ReportFile, *, every: bool = False, clock: Callable[[], int] = time.perf_counter_ns):
        self.file, self._every, self._clock = file, every, clock
        self.on = False
        self.phase = ""
        self.keys: list[Key] = []
        self.listeners: list[Callable[[RecordedStep], None]] = []
        self.memory: Looks | None = None
        self.turn = 0
        self.depth = self._base = 0
        self._numbers: dict[Key, int] = {}
        self._told = self._ended = 0
        self._codes: list[int] = []
        self._times: list[Any] = []
        self._tokens: list[Any] = []
        self.recorded = 0

    def number(self, key: Key) -> int:
        """The number by which spans name ``key``."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return found

    # -- marks ----------------------------------------------------------------------------------------------------

    def open(self, key: int) -> int:
        """A span begins; what ``close`` wants."""
        if self.memory is not None:
            self.memory.before(self.keys[key])
        self.depth += 1
        self._codes.append(key)
        self._stamp()
        return self.turn

    def _stamp(self) -> None:
        self._times.append(self._clock())

    def close(self, turn: int) -> None:
        """The innermost span ends, unless the end of a step has closed it."""
        if turn == self.turn and self.depth:
            self.depth -= 1
            self._codes.append(CLOSE)
            self._stamp()
        if self.memory is not None:
            self.memory.after()

    def open_collective(self, key: int) -> int:
        """A span of a collective, on the stream that is current."""
        return self.open(key)

    def close_collective(self, turn: int) -> None:
        """It ends there."""
        self.close(turn)

    def guard(self) -> AbstractContextManager[None]:
        """Around each phase of a recorded step."""
        return _NOTHING if self.memory is None else self.memory.guard()

    def close_to(self, depth: int, turn: int) -> None:
        """All spans end but the ``depth`` outermost."""
        while turn == self.turn and self.depth > depth:
            self.close(turn)

    def enter_phase(self, phase: str) -> None:
        """The engine is in a phase from here on; what it enters in backward lies inside the spans that are open now."""
        self.phase, self._base = phase, self.depth

    def enter(self, key: int) -> None:
        """Backward comes to another place: the span of the last one ends, and another begins."""
        self.close_to(self._base, self.turn)
        self.open(key)

    def add_tokens_of(self, count: Any) -> None:
        """Of a micro-batch; a number, or a tensor that becomes one; ``None`` where it has none."""
        if count is not None:
            self._tokens.append(count)

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """The step with this number begins here."""
        self.on = self._every or is_sampled(number)
        self.turn += 1
        self.depth = 0
        self.phase = ""
        self._codes, self._times, self._tokens = [], [], []
        if self.on:
            now = self._clock()
            since, self._ended = self._ended or now, 0
            own = self.number(_OWN)
            self._codes += [CLOSE, own, CLOSE]  # the first closes nothing: where the step begins
            self._times += [since, since, now]

    def end(self, number: int, samples: int) -> None:
        """The step ends here."""
        if not self.on:
            return
        self._ended = self._clock()
        self._codes.append(CLOSE)
        self._times.append(self._ended)
        tokens = _sum(self._tokens)
        start = self._times[0]
        times = [(stamp - start) * 1e-9 for stamp in self._times]
        step = RecordedStep(number, start * 1e-9, times[-1], samples, tokens, spans_of(self._codes, times))
        self._complete(step)

    def _complete(self, step: RecordedStep) -> None:
        self.recorded += 1
        new = {index: self.keys[index] for index in range(self._told, len(self.keys))}
        self._told = len(self.keys)
        self.file.add(*([{"keys": new}] if new else []), step.line())
        for listener in self.listeners:
            listener(step)

    def settle(self, *, wait: bool = False) -> None:
        """Complete the steps whose times are known by now, or (``wait``) all."""

    def finish(self) -> None:
        """No step comes any more."""
        self.settle(wait=True)
        self.on = False


def _sum(tokens: Sequence[Any]) -> int | None:
    return int(sum(tokens)) if tokens else None


def spans_of(codes: Sequence[int], times: Sequence[float]) -> list[Span]:
    """Spans from marks; the first and the last mark are the ends of the step."""
    spans: list[Span] = []
    open_: list[int] = []
    last = times[-1]
    for code, at in zip(codes[1:-1], times[1:-1], strict=True):
        if code == CLOSE:
            if open_:
                index = open_.pop()
                spans[index] = spans[index]._replace(seconds=max(0.0, at - spans[index].start))
        else:
            spans.append(Span(code, at, 0.0, len(open_)))
            open_.append(len(spans) - 1)
    for index in open_:  # the step ended inside them
        spans[index] = spans[index]._replace(seconds=max(0.0, last - spans[index].start))
    return spans


class DeviceRecorder(Recorder):
    """Records the steps of an engine that computes on a GPU."""

    def __init__(self, file: ReportFile, device: torch.device, *, every: bool = False) -> None:
        super().__init__(file, every=every)
        self._device = device
        self._idle: list[Any] = []  # events that can be recorded again
        self._pending: deque[tuple[Any, ...]] = deque()
        self._kept_up: list[bool] = []
        self._beside: list[tuple[int, Any, Any]] = []
        self._stack: list[tuple[int, Any] | None] = []
        self._main: Any = None

    def _event(self) -> Any:
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _stamp(self) -> None:
        if self._times:
            self._kept_up.append(self._times[-1].query())
        self._times.append(self._event())

    def add_tokens_of(self, count: Any) -> None:
        super().add_tokens_of(later(count) if isinstance(count, torch.Tensor) else count)

    def _is_main(self) -> bool:
        return bool(torch.cuda.current_stream(self._device) == self._main)

    def open_collective(self, key: int) -> int:
        if self._is_main():
            self._stack.append(None)
            return self.open(key)
        self._stack.append((key, self._event()))
        return self.turn

    def close_collective(self, turn: int) -> None:
        if turn != self.turn or not self._stack:
            return
        begun = self._stack.pop()
        if begun is None:
            self.close(turn)
        else:
            self._beside.append((*begun, self._event()))

    def begin(self, number: int) -> None:
        self.settle()
        super().begin(number)
        self._kept_up, self._beside, self._stack = [], [], []
        if self.on:
            self._codes = [CLOSE]
            self._main = torch.cuda.current_stream(self._device)
            self._times = [self._event()]
            self._host = time.perf_counter()

    def end(self, number: int, samples: int) -> None:
        if not self.on:
            return
        self._codes.append(CLOSE)
        self._stamp()
        self._pending.append(
            (number, samples, self._host, self._codes, self._times, self._tokens, self._beside, self._kept_up)
        )

    def settle(self, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][4][-1].query()):
            number, samples, host, codes, events, tokens, beside, kept_up = self._pending.popleft()
            if wait:
                torch.cuda.synchronize(self._device)
            first = events[0]
            times = [max(0.0, first.elapsed_time(event) * 1e-3) for event in events]
            for place in range(1, len(times)):  # events have half a microsecond's grain
                times[place] = max(times[place], times[place - 1])
            found = []
            for key, start, end in beside:
                if wait or end.query():
                    found.append(Span(key, first.elapsed_time(start) * 1e-3, start.elapsed_time(end) * 1e-3))
            starved = sum(kept_up) / len(kept_up) if kept_up else 0.0
            spans = spans_of(codes, times)
            step = RecordedStep(number, host, times[-1], samples, _sum_on_host(tokens), spans, found, starved)
            self._idle += events
            self._idle += [event for _, *pair in beside for event in pair]
            self._complete(step)


def _sum_on_host(tokens: Sequence[Any]) -> int | None:
    return int(sum(each.item() if isinstance(each, LateCopy) else each for each in tokens)) if tokens else None
