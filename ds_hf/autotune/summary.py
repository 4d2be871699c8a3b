"""What is told of a result: its headline, its lines, and the files that say so."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hf.autotune.confirm import Again
from ds_hf.autotune.lengths import positions_warning
from ds_hf.autotune.load import warning_of
from ds_hf.autotune.options import Metric, gib
from ds_hf.autotune.pareto import rows_of
from ds_hf.autotune.records import Record, value_of
from ds_hf.autotune.result import TUNED, Result
from ds_hf.autotune.space import freed_by
from ds_hf.autotune.study import Search
from ds_hf.autotune.trial import Point
from ds_hf.autotune.view import show_value
from ds_hf.lr import LrResult
from ds_hf.printable import counted
from ds_hf.regular_files import replace_file

__all__ = ["headline", "summary_lines", "warnings_of", "write_result"]

DRIFT = 1.15  # of the machine: more is told


def headline(search: Search, result: Result) -> str:
    """The result in one line, with a figure only where it was confirmed."""
    if result.kept and not search.launches.seeks_length:
        return "No significant gain: your file stays as it is"
    words = {Metric.MEMORY: "less memory", Metric.LATENCY: "faster steps", Metric.BATCH: "larger batches"}
    if search.launches.seeks_length:
        return _longest(search, result)
    what = words.get(search.options.metric, "faster")
    if not result.trusted:
        verb = "may run" if result.own is None else f"may bring {what}" if " " in what else f"may be {what}"
        return f"Not confirmed: another file {verb} ({result.why_not})"
    if result.own is None:
        return "Your file does not fit into memory; the tuned one does, confirmed"
    low, high = result.interval
    if search.options.metric is Metric.MEMORY:
        return f"{1 - 1 / result.gain:.0%} less memory than with your file, confirmed"
    if search.options.metric is Metric.BATCH:
        return f"{result.gain:.3g} x as many samples at once as with your file, confirmed"
    was, now = (seconds and seconds / point.samples
                for seconds, point in zip(result.script, (result.own, result.best[1]), strict=True))  # fmt: skip
    script = f"the whole script {was / now:.2f} x" if was and now and result.workers is None else ""
    if script and was and now and was < now:
        return f"Faster in the engine, confirmed ({low:.1f} to {high:.1f} x); {script}: not seen to be faster"
    if not result.is_certain:
        where = f"{low:.1f} to {high:.1f} x in the engine" + (f", {script}" if script else "")
        return f"Faster than your file, confirmed; by how much is not certain on this machine ({where})"
    figure = f"{result.gain:.2f} x as fast as your file ({low:.2f} to {high:.2f}), confirmed"
    return figure + (f"; {script}" if script else "")


def _longest(search: Search, result: Result) -> str:
    """The length, and the file that trains it."""
    tokens, own = result.best[1].length, result.own
    name = f"your own file ({search.command.config})" if result.kept else str(search.options.results_dir / TUNED)
    beside = "" if result.kept else f", where your file holds {own.length:,}" if own else ", and your file does not fit"
    sure = "confirmed" if result.trusted else f"not confirmed ({result.why_not})"
    return f"Sequences of {tokens:,} tokens fit with {name}{beside}: {sure}"


def warnings_of(search: Search, launches: Sequence[Again] = ()) -> list[str]:
    """What a reader should know of the machine: others' load, and how much its speed changed."""
    records, again = search.launched(), [each.outcome.events for each in launches]
    loads = [events.get("load") or {} for events in (*(record.events for record in records), *again)]
    said = [text for text in map(warning_of, loads) if text]
    found = []
    if said:
        worst = max(loads, key=lambda load: (load.get("gpu") or 0.0, load.get("cpu") or 0.0))
        found.append(f"The machine was not idle: beside {len(said)} of {counted(len(loads), 'launch', 'launches')} "
                     f"{warning_of(worst) or said[0]}.")  # fmt: skip
    speeds = [point.slowdown for record in records for point in record.points]
    drift = max((float((r.events.get("machine") or {}).get("drift", 1.0)) for r in records), default=1.0)
    change = max(drift, max(speeds, default=1.0) / min(speeds, default=1.0))
    if change > DRIFT:
        found.append(f"Its speed changed by {change:.1f} x during the search; launches are compared through probes "
                     "of it, which widens the intervals.")  # fmt: skip
    return found


def write_result(search: Search, result: Result) -> dict[str, Path]:
    """The tuned file, its reasons, the command, the table of trials, and DeepSpeed's names for the same."""
    folder = search.options.results_dir
    text = json.dumps(result.config, indent=2) + "\n"
    command = shlex.join(result.words) + "\n"
    paths = {
        "config": folder / TUNED,
        "reasons": folder / "ds_config.tuned.reasons.json",
        "command": folder / "command.txt",
        "trials": folder / "trials.csv",
    }
    replace_file(paths["config"], text)
    replace_file(folder / "ds_config_optimal.json", text)
    replace_file(paths["reasons"], json.dumps(reasons_of(search, result), indent=2) + "\n")
    replace_file(paths["command"], command)
    replace_file(folder / "cmd_optimal.txt", command)
    replace_file(folder / "summary.txt", "\n".join(summary_lines(search, result)) + "\n")
    _write_trials(search, paths["trials"])
    return paths


def reasons_of(search: Search, result: Result) -> dict[str, Any]:
    """The sidecar of the tuned file, as JSON."""
    record, point = result.best
    return {
        "metric": search.options.metric.value,
        "value": value_of(point, search.options.metric, search.flops),
        "own": None if result.own is None else value_of(result.own, search.options.metric, search.flops),
        "gain": result.gain,
        "gain_interval": list(result.interval),
        "confirmed": result.trusted,
        "why_not_confirmed": result.why_not,
        "gain_is_certain": result.is_certain,
        "launches": dict(zip(("tuned", "yours"), result.launches, strict=True)),
        "warnings": warnings_of(search, result.again),
        "kept_yours": result.kept,
        "changes": [change.__dict__ for change in result.changes],
        "kept": search.space.kept,
        "how_to_free": {name: way for name, why in search.space.kept.items() if (way := freed_by(name, why))},
        "pareto": rows_of(search.launched()),
        "limits": result.limits,
        "limited_by": result.limit,
        "why_stopped": result.why_stopped,
        "bytes_predicted": search.how_bytes,
        "learning_rate": _rate(result.learning_rate),
        "notes": search.own.events.get("notes", []),
        "setting": record.setting,
        "confirmed_seconds": None if result.confirmed is None else result.script[1],
        "own_seconds": result.script[0],
    }


def _rate(found: LrResult | None) -> dict[str, Any] | None:
    if found is None:
        return None
    advice = [{"name": each.name, "config": each.config, "arguments": each.arguments} for each in found.advice()]
    return {"suggested": found.lr, "interval": found.interval, "reason": found.reason, "advice": advice}


def summary_lines(search: Search, result: Result) -> list[str]:
    """The result in a few lines of plain text."""
    record, point = result.best
    lines = []
    if result.own is not None:
        lines.append(f"your file: {_line(search, result.own)}")
    else:
        lines.append("your file: does not fit into memory")
    if result.kept:
        lines.append("no significant gain; your file is kept" + (f": {result.rejected}" if result.rejected else ""))
    else:
        low, high = result.interval
        figure = f"{result.gain:.2f} x, " if result.is_certain else "" if result.trusted else "not confirmed, "
        times = f", {figure}{low:.2f} to {high:.2f} x" if result.own is not None else ""
        lines.append(f"tuned:     {_line(search, point)}{times}   [{record.label}]")
        lines += [
            f"  {change.key}: {json.dumps(change.before)} -> {json.dumps(change.after)}: {change.reason}"
            for change in result.changes
        ]
        lines.append(_confirmation(result))
    shares = ", ".join(
        f"{kind} {share:.0%}" for kind, share in sorted(result.limits.items(), key=lambda i: -i[1]) if share > 0.005
    )
    lines.append(f"limited by {result.limit} ({shares})")
    lines += warnings_of(search, result.again)
    if search.launches.seeks_length:
        lines += positions_warning(search.own.events, point.length)
    launched = len(search.launched())
    ruled = len(search.journal.records()) - launched
    counts = f"{counted(launched + len(result.again), 'launch', 'launches')}, {len(result.again)} of them to confirm"
    settings = counted(ruled, "setting", "settings")
    lines.append(f"{counts}, {settings} ruled out without one; stopped: {result.why_stopped}")
    return lines


def _line(search: Search, point: Point) -> str:
    metric = search.options.metric
    value = show_value(value_of(point, metric, search.flops), metric)
    noise = f"{point.low / point.seconds - 1:+.1%} {point.high / point.seconds - 1:+.1%}"
    batch = f"micro-batch {point.micro} x {point.accumulation}"
    return f"{value} ({point.seconds * 1e3:,.1f} ms/step, {noise}), {gib(point.peak)}, {batch}{_tokens(search, point)}"


def _tokens(search: Search, point: Point) -> str:
    """Tokens a second, where samples are texts of one length, and what they cost, if an hour has a price."""
    shapes = search.own.events.get("survey", {}).get("shapes") or {}
    pace, unit, text = point.samples / point.seconds, "samples", ""
    shape = next((shape for name, shape in shapes.items() if "input_ids" in name and len(shape) == 2), None)
    if tokens := point.length or (shape and shape[1]):
        pace, unit = pace * tokens, "tokens"
        text = f", {pace:,.0f} tokens/s"
    if search.options.price is None:
        return text
    return f"{text}, {price_of(search, pace):.4g} a million {unit} at {search.options.price:g} a device and hour"


def price_of(search: Search, pace: float) -> float:
    """Of a million at ``pace`` a second, on all devices."""
    assert search.options.price is not None
    facts = search.own.events["facts"]
    devices = int(facts.get("processes") or facts["world_size"])
    return search.options.price * devices / 3600 / pace * 1e6


def _confirmation(result: Result) -> str:
    before, after = result.script
    if not result.trusted:
        return f"  NOT confirmed: {result.why_not}"
    tuned, yours = result.launches
    text = f"  confirmed by {counted(tuned, 'launch', 'launches')} of it"
    text += f" and {yours} of your file" if yours else ""
    if after is not None:
        text += f": the script itself takes {after * 1e3:,.1f} ms/step with it"
        text += f", and {before * 1e3:,.1f} ms/step with your file" if before is not None else ""
    return text


def _write_trials(search: Search, path: Path) -> None:
    """One row a measured point, or a setting without any."""
    names = [
        "trial",
        "setting",
        "outcome",
        "reason",
        "micro",
        "accumulation",
        "tokens",
        "seconds",
        "low",
        "high",
        "samples_per_s",
        "peak_bytes",
        "predicted_seconds",
        "predicted_bytes",
        "launch_seconds",
        "own",
    ]
    axes = [axis.name for axis in search.space.axes]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *axes])
    writer.writeheader()
    for record in search.journal.records():
        row: dict[str, Any] = {
            "trial": record.number,
            "setting": record.label,
            "outcome": record.kind,
            "reason": record.reason,
            "launch_seconds": record.seconds,
            "own": record.own,
            **record.setting,
        }
        for point in record.points or (None,):
            writer.writerow({**row, **_point_cells(search, record, point)})
    replace_file(path, text.getvalue())


def _point_cells(search: Search, record: Record, point: Point | None) -> dict[str, Any]:
    if point is None:
        return {}
    seconds, nbytes = record.predicted.get(point.micro, ("", ""))
    return {
        "micro": point.micro,
        "accumulation": point.accumulation,
        "tokens": point.length or "",
        "seconds": point.seconds,
        "low": point.low,
        "high": point.high,
        "samples_per_s": value_of(point, Metric.THROUGHPUT),
        "peak_bytes": point.peak,
        "predicted_seconds": seconds,
        "predicted_bytes": nbytes,
    }
