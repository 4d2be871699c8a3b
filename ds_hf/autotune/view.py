"""What the terminal shows while a search runs: a table that stays in place, or one line an event where it is no
terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ds_hf.autotune.load import warning_of
from ds_hf.autotune.options import Metric, Options, gib
from ds_hf.autotune.records import Record, value_of
from ds_hf.autotune.space import Setting, label_of
from ds_hf.autotune.trial import Point, samplers
from ds_hf.printable import printable

__all__ = ["View", "duration", "gib", "show_value"]

SHOWN = 14  # rows of the live table
STYLES = {"ok": "green", "oom": "yellow", "pruned": "dim", "ruled out": "dim"}


def show_value(value: float, metric: Metric) -> str:
    """A value with its unit."""
    if metric is Metric.MEMORY:
        return gib(value)
    if metric is Metric.BATCH:
        return f"{value:,.0f} samples at once"
    if metric is Metric.LENGTH:
        return f"{value:,.0f} tokens a sequence"
    if metric is Metric.FLOPS:
        return f"{value / 1e12:.3g} TFLOPS"
    return f"{value * 1e3:,.1f} ms/step" if metric is Metric.LATENCY else f"{value:,.2f} samples/s"


def duration(seconds: float) -> str:
    """ "1:05" or "2:03:00"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class View:
    """Told by the search what happens.

    Args:
        quiet: show nothing (tests, and calls from other programs).
    """

    def __init__(self, console: Console, options: Options, *, quiet: bool = False) -> None:
        self.console, self.options, self.quiet = console, options, quiet
        self.records: list[Record] = []
        self.ruled = 0
        self.count = 0  # launches begun
        self._warned = False
        self.data = 1
        self.flops = 1.0
        self.now = ""
        self.detail = ""
        self.since = time.monotonic()
        self._left: tuple[float, float] | None = None  # seconds that were expected, and when
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on the screen inside."""
        if self.quiet or not self.console.is_terminal:
            yield
            return
        with Live(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True
        ) as self._live:
            yield
        self._live = None

    def begin(self) -> None:
        """The search begins."""
        budget = self.options.budget
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + budget))
        self._say(f"a search of at most {duration(budget)}, until {until}: your file first, then other settings, and "
                  "the best of them again beside your file")  # fmt: skip

    def expect(self, seconds: float) -> None:
        """So much is left, as far as is known."""
        self._left = (seconds, time.monotonic())

    def note_load(self, events: dict[str, Any]) -> None:
        """Warn of what else ran beside a launch: once, for the end says beside how many."""
        text = warning_of(events.get("load") or {})
        if text and not self._warned:
            self._warned = True
            self._say(f"  warning: {text}; times are compared with what a fixed probe took, and are less certain")

    def eta(self) -> str:
        """What has passed and what is left, from the first second on: at first the budget is all that is known."""
        now = time.monotonic()
        spent, least = now - self.since, max(0.0, self.options.budget - (now - self.since))
        if self._left is None:
            return f"{duration(spent)} passed, at most {duration(least)} left"
        seconds, then = self._left
        return f"{duration(spent)} passed, about {duration(max(0.0, min(least, seconds - (now - then))))} left"

    def started(
        self,
        number: int,
        setting: Setting | str,
        predicted: dict[int, tuple[float, int]] | None,
        *,
        goes_on: bool = False,
        tokens: int | None = None,
    ) -> None:
        """A launch begins, after ``number`` that an earlier run of this search made.

        Args:
            goes_on: in the processes of the one before. tokens: of the longest sequences that are expected to fit.
        """
        self.count = max(self.count, number) + 1
        self.now = setting if isinstance(setting, str) else label_of(setting)
        self.detail = f"expected {tokens:,} tokens a sequence" if tokens else ""
        if predicted:
            micro, (seconds, nbytes) = next(iter(predicted.items()))
            self.detail = f"expected {seconds * 1e3:,.0f} ms/step, {gib(nbytes)} at micro-batch {micro}"
        said = [f"launch {self.count}{', in the same processes' if goes_on else ''}: {self.now}"]
        self._say(f"[{self.eta()}] " + " ".join([*said, *([f"({self.detail})"] if self.detail else [])]))

    def event(self, event: dict[str, Any]) -> None:
        """The engine said something."""
        if event["event"] == "facts":
            self.data, devices = samplers(event), event.get("processes") or event["world_size"]
            self.detail = f"{event['total'] / 1e6:,.1f} M parameters on {devices} x {event['device']}"
        elif event["event"] == "survey":
            self.flops = float(event.get("flops") or self.data) / self.data
        elif event["event"] == "point" and event["outcome"] == "ok":
            self.detail = f"micro-batch {event['micro']}: {event['seconds'] * 1e3:,.1f} ms/step"

    def detailed(self, text: str) -> None:
        """What the launch that runs is doing."""
        self.detail = text

    def ended(self, record: Record) -> None:
        """A launch is over."""
        self.records.append(record)
        self.now = self.detail = ""
        self._say("  " + "  ".join(part for part in (*self._cells(record)[1:], f"{record.seconds:.0f} s") if part))
        self.note_load(record.events)

    def ruled_out(self, setting: Setting, reason: str) -> None:
        """A setting was ruled out by its prediction."""
        self.ruled += 1
        self._say(f"ruled out without a launch: {label_of(setting)}: {reason}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        """A line where there is no live table."""
        if self._live is None:
            self.say(text)

    def _cells(self, record: Record) -> tuple[str, ...]:
        best = record.best(self.options.metric)
        name = record.label + (" (your file)" if record.own else "")
        if best is None:
            return (str(record.number), name, "", "", "", record.kind, record.reason)
        value = show_value(value_of(best, self.options.metric, self.flops), self.options.metric)
        noise = "({:+.0%} {:+.0%})".format(*(p / best.seconds - 1 for p in (best.low, best.high)))  # of a time alone
        batch = f"{best.micro} x {best.accumulation}"
        expected = record.predicted.get(best.micro)
        ratio = f"{best.seconds / expected[0]:.2f} of expected" if expected else ""
        return (
            str(record.number),
            name,
            batch,
            f"{value} {noise}" if self.options.metric.is_timed else value,
            gib(best.peak),
            record.kind,
            ratio,
        )

    def _render(self) -> Group:
        table = Table(title="trials", title_justify="left", expand=False)
        for name in ("#", "setting", "micro x acc.", self.options.metric.value, "memory", "outcome", ""):
            table.add_column(name, overflow="fold")
        ordered = sorted(self.records, key=self._order)
        for record in ordered[:SHOWN]:
            style = STYLES.get(record.kind, "red")
            cells = [Text(cell) for cell in self._cells(record)]
            cells[5].stylize(style)
            if record is ordered[0] and record.points:
                cells[3].stylize("bold")
            table.add_row(*cells)
        head = f"{self.eta()}; {len(self.records)} launches, {self.ruled} ruled out"
        spent = time.monotonic() - self.since
        left = self.options.budget - spent if self._left is None else self._left[0] - (time.monotonic() - self._left[1])
        bar = ProgressBar(total=max(1.0, spent + max(0.0, left)), completed=spent, width=60)
        self._spinner.update(text=Text(f" {self.now}  {self.detail}" if self.now else " choosing"))
        return Group(Text(head, "bold"), bar, table, self._spinner)

    def _order(self, record: Record) -> tuple[bool, float]:
        best: Point | None = record.best(self.options.metric)
        if best is None:
            return True, 0.0
        value = value_of(best, self.options.metric)
        return False, -value if self.options.metric.maximize else value
