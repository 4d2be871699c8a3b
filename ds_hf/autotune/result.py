"""What came out: the best setting or the user's own, why each key was changed, and the files that say so."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_hf.autotune.command import LENGTH
from ds_hf.autotune.confirm import LEAST_GAIN, Again, Contest, Contestant
from ds_hf.autotune.division import EXPERTS, PIPE, SEQUENCE, TENSOR
from ds_hf.autotune.lengths import positions_warning
from ds_hf.autotune.load import warning_of
from ds_hf.autotune.options import Metric, gib
from ds_hf.autotune.pareto import rows_of
from ds_hf.autotune.records import Record, records_of, value_of
from ds_hf.autotune.space import (
    ACTIVATIONS,
    CAPTURE,
    CHECKPOINTING,
    CHUNKED_LOSS,
    COMMUNICATION,
    COMPILE,
    FP8,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    STAGE,
    WORKERS,
    Setting,
    freed_by,
)
from ds_hf.autotune.study import Search
from ds_hf.autotune.trial import LaunchOutcome, Point, launch_words
from ds_hf.autotune.view import show_value
from ds_hf.config.load import examine
from ds_hf.config.schema import schema_moved
from ds_hf.config.triple import WorldSize
from ds_hf.errors import DsHfError
from ds_hf.lr import LrResult
from ds_hf.measure.machine import Estimate, gain_of
from ds_hf.regular_files import replace_file

__all__ = [
    "Change",
    "NothingFits",
    "Result",
    "final_words",
    "headline",
    "limits_of",
    "make_result",
    "summary_lines",
    "warnings_of",
    "write_result",
]

DRIFT = 1.15  # of the machine: more is told
UNSURE = 1.25  # of the upper end of a gain over the gain: more makes no figure
MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
TUNED = "ds_config.tuned.json"


class NothingFits(DsHfError):
    """No setting could be measured."""


@dataclass(frozen=True)
class Change:
    """One key that is not as the user had it, and why."""

    key: str
    before: Any
    after: Any
    reason: str


@dataclass
class Result:
    """The end of a search.

    Attributes:
        best: record and point that won; ``own``: the user's, ``None`` when that did not fit.
        kept: the user's file stays, as nothing was better by more than the noise.
        gain: how many times better the best is in the engine (1 when kept); ``interval``: 95 % of it.
        trusted: it was started again beside the user's file, and the intervals separated; ``why_not`` where not.
        launches: of the best and of the user's file, on which ``gain`` rests.
        again: launches after the search.
        confirmed: the last launch of the result as a user starts it; ``None`` when there was none.
        script: seconds of the script's own step, with the user's file and with the result.
        rejected: what looked better and was not when the script itself ran with it.
        workers: of the script's DataLoader, where more than it has pay.
        limits: shares of a step's time, and what limits it.
        paths: what was written: "config" (the best file), "report", "trials", "reasons", "command".
    """

    best: tuple[Record, Point]
    own: Point | None
    kept: bool
    gain: float
    config: dict[str, Any]
    interval: tuple[float, float] = (1.0, 1.0)
    trusted: bool = False
    why_not: str = ""
    launches: tuple[int, int] = (1, 1)
    script: tuple[float | None, float | None] = (None, None)
    again: list[Again] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    confirmed: LaunchOutcome | None = None
    limits: dict[str, float] = field(default_factory=dict)
    limit: str = ""
    why_stopped: str = ""
    rejected: str = ""
    workers: int | None = None
    learning_rate: LrResult | None = None
    paths: dict[str, Path] = field(default_factory=dict)

    @property
    def table(self) -> list[dict[str, str]]:
        """All that was measured or ruled out: the rows of ``trials.csv``."""
        return list(csv.DictReader(io.StringIO(self.paths["trials"].read_text("utf-8"))))

    @property
    def is_certain(self) -> bool:
        """Whether the gain is known well enough to be told as a figure."""
        return self.trusted and self.interval[1] <= UNSURE * self.gain


def make_result(contest: Contest) -> Result:
    """Choose among what was measured.

    Raises:
        NothingFits: nothing was.
    """
    search, ranked, own = contest.search, contest.ranked(), contest.own()
    if not ranked:
        raise NothingFits(_why_nothing_fits(search))
    top = ranked[0]
    gain, low, high = (1.0, 1.0, 1.0) if own is None else gain_of(own.estimate, top.estimate)
    kept = own is not None and (bool(contest.denied) or top.key == own.key or gain < LEAST_GAIN or low <= 1)
    chosen = own if kept and own is not None else top
    best, size = (chosen.record, chosen.point), (chosen.point.micro, chosen.point.accumulation)
    config = search.launches.final_config(best[0].setting, size, chosen.point.data)
    config = schema_moved(config, search.command.config)
    measured = None if own is None else _shown(search, own)
    result = Result(best, measured, kept, 1.0 if kept else gain, config, why_stopped=search.why_stopped)
    result.best = (best[0], _shown(search, chosen))
    result.interval = (low, high) if not kept or top is not chosen else (1.0, 1.0)
    result.trusted = bool(chosen.again and (own is None or own.again or not search.options.metric.is_timed))
    result.why_not = "" if result.trusted else contest.why_ended or "it was not started again"
    result.again = list(contest.launches)
    result.launches = (chosen.estimate.launches, 0 if own is None else own.estimate.launches)
    result.script = (_script(contest, own), _script(contest, chosen))
    result.confirmed = chosen.again[-1] if chosen.again and not kept else None
    result.rejected = _rejected(contest, top, own) if kept else ""
    result.changes = [] if kept else changes_of(search, result.best)
    result.words = final_words(search, best[0].setting, size, length=chosen.point.length or None)
    result.limits, result.limit = limits_of(search, result.best)
    facts = search.own.events["facts"]
    processes = int(facts.get("processes") or facts["world_size"])
    claims = search.space.division.of(best[0].setting).claims
    examine(config, world=WorldSize(processes, "the search"), allow_auto=True, given=claims)  # never write a bad file
    return result


def _shown(search: Search, chosen: Contestant) -> Point:
    """The point with what all its launches say together."""
    if not search.options.metric.is_timed:
        return chosen.point
    found, unit = chosen.estimate, search.cost(chosen.point) / chosen.point.seconds
    low, high = found.low / unit, found.high / unit
    return replace(chosen.point, seconds=found.seconds / unit, low=low, high=high, error=found.error)


def _script(contest: Contest, chosen: Contestant | None) -> float | None:
    found: Estimate | None = None if chosen is None else contest.natural(chosen)
    return None if found is None or chosen is None else found.seconds * chosen.point.samples


def _rejected(contest: Contest, top: Contestant, own: Contestant | None) -> str:
    """What looked better than the user's file and is not."""
    labels = {(r.key, p.micro, p.accumulation): r.label for r in contest.search.launched() for p in r.points}
    said = [f"{labels[key]} was fast in the engine, but {reason}" for key, reason in contest.failed.items()]
    said += [contest.denied] if contest.denied else []
    if own is not None and top.key != own.key and not said:
        gain, low, high = gain_of(own.estimate, top.estimate)
        each = _several(min(top.estimate.launches, own.estimate.launches), "launch", "launches")
        said.append(f"the best other setting ({top.record.label}) is {gain:.2f} x as fast, {low:.2f} to {high:.2f}, "
                    f"by {each} of each")  # fmt: skip
    return "; ".join(said)


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
    name = f"your own file, {search.command.config}," if result.kept else str(search.options.results_dir / TUNED)
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
        found.append(f"The machine was not idle: beside {len(said)} of {_several(len(loads), 'launch', 'launches')} "
                     f"{warning_of(worst) or said[0]}.")  # fmt: skip
    speeds = [point.slowdown for record in records for point in record.points]
    drift = max((float((r.events.get("machine") or {}).get("drift", 1.0)) for r in records), default=1.0)
    change = max(drift, max(speeds, default=1.0) / min(speeds, default=1.0))
    if change > DRIFT:
        found.append(f"Its speed changed by {change:.1f} x during the search; launches are compared through probes "
                     "of it, which widens the intervals.")  # fmt: skip
    return found


def _why_nothing_fits(search: Search) -> str:
    records = records_of(search.study)
    lines = [f"  {record.label}: {record.reason or record.kind}" for record in records[:8]]
    return "\n".join(
        [
            "no setting could be measured; nearest first:",
            *lines,
            "free more keys (--tune all, gradient checkpointing), or use more devices or a smaller model",
        ]
    )


def final_words(
    search: Search,
    setting: Setting,
    size: tuple[int, int],
    workers: int | None = None,
    *,
    length: int | None = None,
) -> list[str]:
    """The whole command with the tuned file."""
    values: dict[str, object] = {MICRO: size[0], STEPS: size[1]}
    for name in (CHECKPOINTING, PIPE):
        if name in setting and setting[name] != search.space.own[name]:
            values[name] = setting[name]
    if workers is not None:
        values[WORKERS] = workers
    if length is not None:
        values[LENGTH] = length
    path = search.options.results_dir / TUNED
    words = search.command.words(path, values)
    whole = launch_words(search.options.launcher, search.problem.processes, words)
    return ["torchrun", *whole[3:]] if not search.options.launcher else whole


# -- reasons ------------------------------------------------------------------------------------------------------


def changes_of(search: Search, best: tuple[Record, Point]) -> list[Change]:
    """Every key that differs from the user's, with its reason."""
    record, point = best
    facts = search.own.events["facts"]
    own_size = {MICRO: facts["micro"], STEPS: facts["accumulation"], TOTAL: facts["train_batch"]}
    new_size = {
        MICRO: point.micro,
        STEPS: point.accumulation,
        TOTAL: point.samples,
    }
    changes = [
        Change(name, search.space.own[name], value, _reason(search, best, name))
        for name, value in record.setting.items()
        if value != search.own.setting.get(name)
    ]
    for name in (MICRO, STEPS, TOTAL):
        if own_size[name] != new_size[name]:
            changes.append(Change(name, own_size[name], new_size[name], _batch_reason(search, best, name)))
    if search.launches.seeks_length:
        reason = f"the longest that fit: {gib(point.peak)} at the peak of {gib(search.model.memory or 0)}"
        changes.append(Change(search.command.mappings[LENGTH], search.tokens, point.length, reason))
    return changes


def _batch_reason(search: Search, best: tuple[Record, Point], name: str) -> str:
    record, point = best
    grows = search.options.metric is Metric.BATCH and search.options.high_batch is None
    if name == STEPS and (not grows or point.samples == search.own.events["facts"]["train_batch"]):
        return f"keeps the global batch at {point.samples}"
    if name == STEPS:
        return "with the micro-batch, which is the global batch now"
    if name == TOTAL:
        way = "grows with the micro-batch" if grows else "inside the interval that you allowed"
        return f"{way}; the learning rate is for the batch that you had (--with-lr finds another)"
    others = sorted((p for p in record.points if p.micro != point.micro), key=search.cost)
    text = f"{gib(point.peak)} at the peak"
    if search.model.memory:
        text += f" of {gib(search.model.memory)}, {1 - point.peak / search.model.memory:.0%} left"
    if others:
        text += f"; {search.cost(others[0]) / search.cost(point):.2f} x better than micro-batch {others[0].micro}"
    too_large = [micro for micro in record.too_large if micro > point.micro]
    return text + (f"; {min(too_large)} runs out of memory" if too_large else "")


def _reason(search: Search, best: tuple[Record, Point], name: str) -> str:
    record, point = best
    value = record.setting[name]
    effect = _effect(search, best, name)
    states = search.model.states(record.setting, point.accumulation)
    room = f" of {gib(search.model.memory)}" if search.model.memory else ""
    texts = {
        STAGE: {
            0: f"everything whole on each device takes {gib(states.device)}{room}; gradients are reduced once a step",
            1: f"optimizer states divided: {gib(states.device)}{room} a device; gradients are reduced once a "
            "step, not every micro-batch",
            2: f"optimizer states and gradients divided: {gib(states.device)}{room} a device; parameters are not "
            "gathered for every micro-batch",
            3: f"parameters divided as well: {gib(states.device)}{room} a device, which leaves room for activations",
        }.get(value, ""),
        OFFLOAD_OPTIMIZER: "optimizer states in host memory make room on the device"
        if value == "cpu"
        else "optimizer states fit on the device, where the update is faster",
        OFFLOAD_PARAM: "parameters in host memory make room on the device"
        if value == "cpu"
        else "parameters fit on the device",
        COMPILE: "compiled blocks compute faster" if value else "eager blocks are faster here",
        FP8: "products in fp8 are faster, and what is computed is rounded to it" if value else "bf16 is as fast here",
        CAPTURE: "blocks in graphs no longer wait for the host" if value else "eager blocks are as fast here",
        CHECKPOINTING: "recomputing activations makes room for a larger micro-batch"
        if value
        else "activations fit, so nothing is computed twice",
        ACTIVATIONS: "inputs of checkpointed blocks in host memory make room on the device"
        if value
        else "inputs of checkpointed blocks fit on the device",
        CHUNKED_LOSS: "logits that are never all there make room" if value else "logits fit on the device",
        COMMUNICATION: f"gradients travel as {value}",
        TENSOR: f"{value} processes share the layers, each with a part of their weights and activations"
        if value != 1
        else "each process computes whole layers, so that nothing is exchanged in them",
        PIPE: f"{value} processes have a stretch of the layers each, and send what is between them"
        if value != 1
        else "each process has all layers, and waits for none",
        EXPERTS: {
            0: "experts as transformers computes them",
            1: "all experts of a process in one product, without transformers' own sort and gathers",
        }.get(value, f"experts are divided over {value} processes, and tokens travel"),
        SEQUENCE: f"{value} processes share each sequence, each with the activations of a part of it"
        if value != 1
        else "each process computes whole sequences, so that attention exchanges nothing",
    }
    return "; ".join(part for part in (texts.get(name, ""), effect) if part)


def _effect(search: Search, best: tuple[Record, Point], name: str) -> str:
    """What the key alone does: measured where a launch differs in nothing else, otherwise by the corrected model."""
    record, point = best
    alone = {**record.setting, name: search.own.setting[name]}
    if search.launches.seeks_length:
        return (
            f"{point.length:,} tokens against {search.longest(alone):,} expected with {_show(search.own.setting[name])}"
        )
    twin = next((r for r in search.launched() if r.points and r.setting == alone), None)
    if twin is not None:
        other = min(twin.points, key=search.cost)
        return f"{search.cost(other) / search.cost(point):.2f} x against {_show(search.own.setting[name])}, measured"
    if not search.space.is_legal(alone):
        return ""
    expected = search.model.predict(alone, point.micro, point.accumulation).seconds
    expected *= search.data(record.setting) / search.data(alone)  # as many samples
    return f"{expected / point.seconds:.2f} x against {_show(search.own.setting[name])}, by the cost model"


def _show(value: Any) -> str:
    return json.dumps(value)


def limits_of(search: Search, best: tuple[Record, Point]) -> tuple[dict[str, float], str]:
    """Shares of a step's time in the best setting, and the kind that limits it."""
    record, point = best
    split = record.events.get("split", {})
    update = point.optimizer_seconds / point.seconds if point.seconds else 0.0
    shares = {"optimizer": update}
    rest = 1 - update
    if "compute" in split:
        shares["communication"] = rest * float(split["communication"])
        shares["host"] = rest * float(split["idle"])
        shares["compute"] = max(0.0, 1 - sum(shares.values()))
    else:  # the launch ended before its profile
        shares["forward and backward"] = rest
    own = next((p for p in search.own.points if p.micro == search.own.events["facts"]["micro"]), None)
    if own is not None and search.own.natural:
        natural = sorted(search.own.natural)[len(search.own.natural) // 2]
        outside = max(0.0, natural - own.seconds)
        whole = point.seconds + outside
        shares = {kind: share * point.seconds / whole for kind, share in shares.items()}
        shares["data and script"] = outside / whole
    return shares, max(shares, key=lambda kind: shares[kind])


# -- files --------------------------------------------------------------------------------------------------------


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
            f"  {change.key}: {_show(change.before)} -> {_show(change.after)}: {change.reason}"
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
    ruled = len(records_of(search.study)) - launched
    counts = f"{_several(launched + len(result.again), 'launch', 'launches')}, {len(result.again)} of them to confirm"
    settings = _several(ruled, "setting", "settings")
    lines.append(f"{counts}, {settings} ruled out without one; stopped: {result.why_stopped}")
    return lines


def _several(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


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
    text = f"  confirmed by {_several(tuned, 'launch', 'launches')} of it"
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
    for record in records_of(search.study):
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
