"""Workers of the script's DataLoader: tried after the search, and only where the script was seen to wait for data.

They are no axis of the search. The engine's launches replay one batch, which says nothing of loading; and what workers
hide does not depend on the other keys. So the script itself runs with and without them, and both are timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ds_hf.autotune.confirm import LEAST_GAIN
from ds_hf.autotune.reasons import Change
from ds_hf.autotune.records import LEAST_WAIT, wait_share
from ds_hf.autotune.result import Result, final_words
from ds_hf.autotune.space import WORKERS
from ds_hf.autotune.study import Search
from ds_hf.measure.statistics import summarise

__all__ = ["try_workers"]


def try_workers(search: Search, result: Result) -> None:
    """Start the script with workers if it waits for data; they stay if it is then faster by more than the noise.

    Why not, where not, is said in ``search.space.kept``.
    """
    reason = _why_not(search) or _not_measured(search, result)
    if reason:
        search.space.kept[WORKERS] = reason
        return
    steps, waits = _base(search, result)
    before = int(search.command.given(WORKERS) or 0)
    count = _count(steps, waits, before, int(search.own.events["facts"].get("cores") or 1))
    record, point = result.best
    size = (point.micro, point.accumulation)
    search.view.started(len(search.launched()), f"workers of the DataLoader: {count}", None)
    outcome = search.launches.natural("workers", record.setting, size, point.data, workers=count)
    waited = _waited(steps, waits)
    if not outcome.natural:
        search.space.kept[WORKERS] = f"{waited}; with {count} workers the script failed: {outcome.reason}"
        return
    was, now = summarise(list(steps)), summarise(outcome.natural)
    measured = f"with {count} it takes {now.median * 1e3:,.0f} ms instead of {was.median * 1e3:,.0f}, measured"
    if now.high >= was.low or was.median / now.median < LEAST_GAIN:
        search.space.kept[WORKERS] = f"{waited}; {measured}, which is not a significant gain"
        return
    result.changes.append(Change(WORKERS, before, count, f"{waited}; {measured}"))
    result.words, result.workers = final_words(search, record.setting, size, count), count
    result.confirmed = outcome
    result.kept = False  # ``gain`` stays that of the engine, which has no part in this one


def _why_not(search: Search) -> str:
    """Why the key is not free; empty where it is."""
    options, command = search.options, search.command
    if WORKERS not in command.mappings:
        return "the script has no option for it (autotuning.arg_mappings names one)"
    if WORKERS in options.fix:
        return "--fix"
    if command.given(WORKERS) is not None and not {WORKERS, "all"} & set(options.tune):
        return "given on the command line"
    if not options.metric.is_timed:
        return "changes nothing of the memory of the device"
    return "autotuning.fast" if options.fast else ""


def _not_measured(search: Search, result: Result) -> str:
    """Why there is nothing to gain, or no way to find out; empty where there is."""
    steps, waits = _base(search, result)
    if not steps:
        spent = search.launches.left < search.typical()
        return f"the script's own steps were not measured{': the budget is spent' if spent else ''}"
    if wait_share(steps, waits) < LEAST_WAIT:
        return _waited(steps, waits)
    if search.launches.left < min(record.seconds for record in search.launched()):
        return f"{_waited(steps, waits)}, but the budget is spent"
    return ""


def _base(search: Search, result: Result) -> tuple[Sequence[float], Sequence[float]]:
    """Steps and waits of the script with the best setting and without more workers."""
    if result.kept or result.confirmed is None:
        same = result.kept and result.best[0].own
        return (search.own.natural, search.own.waits) if same else ((), ())
    return result.confirmed.natural, result.confirmed.waits


def _waited(steps: Sequence[float], waits: Sequence[float]) -> str:
    wait, step = statistics.median(waits or (0.0,)) * 1e3, statistics.median(steps) * 1e3
    return (
        f"the script waits {wait_share(steps, waits):.1%} of its time for data ({wait:,.1f} of {step:,.1f} ms a step)"
    )


def _count(steps: Sequence[float], waits: Sequence[float], before: int, cores: int) -> int:
    """As many as load a step's samples in the time of the rest of the step, on the cores that there are."""
    wait, step = statistics.median(waits), statistics.median(steps)
    needed = 2 * before if before else math.ceil(wait / max(step - wait, 0.05 * step))
    return max(1, before, min(needed, max(cores, 1)))
