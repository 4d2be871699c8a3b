"""``report.html``, the trace beside it, and ``verdict.txt``: everything that is made of a folder."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from ds_hf.autotune.page import code, facts, notice, page, section, side_by_side, table
from ds_hf.errors import DsHfError
from ds_hf.printable import harmless
from ds_hf.profile import figures
from ds_hf.profile.analysis import Analysis, analyse
from ds_hf.profile.load import FAULTS, read_run
from ds_hf.profile.trace import trace_text
from ds_hf.profile.verdict import NAMES, Verdict, judge, milliseconds
from ds_hf.regular_files import replace_file

__all__ = ["CONFIG", "PAGE", "TRACE", "WORDS", "closing_words", "report_html", "write_report"]

PAGE, TRACE, WORDS, CONFIG = "report.html", "trace.json", "verdict.txt", "ds_config.suggested.json"


def write_report(folder: str | Path) -> Verdict:
    """Read a folder and write what it says beside the ranks' files: the page, the trace, the verdict in words, and the
    file with the suggested changes where there are any.

    Raises:
        DsHfError: there is no report in it.
        OSError: nothing can be written there.
    """
    path = Path(folder)
    try:
        verdict = judge(analyse(read_run(path)))
        texts = {
            PAGE: report_html(verdict),
            TRACE: trace_text(verdict.analysis),
            WORDS: "\n".join(closing_words(verdict)) + "\n",
        }
        if verdict.config is not None:
            texts[CONFIG] = json.dumps(verdict.config, indent=2) + "\n"
    except DsHfError:
        raise
    except FAULTS as error:
        raise DsHfError(
            f"{path}: its files are not as a run writes them ({type(error).__name__}: {error!s:.200}): record the run "
            "again"
        ) from harmless(error)
    for name, text in texts.items():
        replace_file(path / name, text)
    if verdict.config is None:
        (path / CONFIG).unlink(missing_ok=True)
    return verdict


def closing_words(verdict: Verdict) -> list[str]:
    """The paragraph at the end of training."""
    a = verdict.analysis
    steps = f"steps {a.steps[0]} to {a.steps[-1]}, {len(a.steps)} of them recorded" if a.steps else "no steps"
    where = a.run.folder / PAGE
    return [f"where the time went ({steps}):", *verdict.lines(), f"report: {where}"]


def report_html(verdict: Verdict) -> str:
    """The whole page."""
    a, run = verdict.analysis, verdict.analysis.run
    header = run.header
    title = f"ds-hf profile: {' '.join(header['command'])}"
    total = header["facts"]["total"]
    about = (
        f"{header['model_name']}, {total / 1e6:,.1f} M parameters in {header['dtype']}, {run.world_size} x "
        f"{header['facts']['device']}, torch {header['facts']['torch']}"
    )
    if not a.steps:
        return page(title, verdict.headline, [*_notices(verdict)], about=about, tone="warn")
    number = figures.typical_step(a)
    heat = figures.heat_map(a)
    lines = figures.history(a)
    body = [
        *_notices(verdict),
        _figures(a),
        section("What limits it", _findings(verdict), text=verdict.summary + "."),
        _changes(verdict),
        section(
            "From the floor to a step",
            figures.waterfall(a),
            text="Each bar begins where the one above ends. What is exposed runs while nothing is computed.",
        ),
        section(
            "A step over the ranks",
            figures.legend(list(a.kinds)),
            figures.timeline(a, number),
            text=f"Step {number}, whose length is the median. The pointer on a bar tells what it is.",
        ),
        section(
            "Ranks that others wait for",
            heat or "<p>There is one rank.</p>",
            text="How much longer a rank takes at a place than the others, in the median of the steps.",
        ),
        *_memory(a),
        section("Over time", '<div class="beside">' + "".join(f"<div>{each}</div>" for each in lines) + "</div>")
        if lines
        else "",
        section("All kinds", _kinds(a)),
        section("In words", code("\n".join(closing_words(verdict)))),
    ]
    tone = "good" if all(finding.kind == "compute" for finding in verdict.findings) else "warn"
    return page(title, verdict.headline, body, about=about, tone=tone)


def _notices(verdict: Verdict) -> list[str]:
    run = verdict.analysis.run
    found = []
    if not run.ended:
        last = max((max(rank.steps, default=0) for rank in run.ranks), default=0)
        found.append(notice(f"The run had not ended, or was ended, when this was recorded; the last step is {last}."))
    if run.missing:
        found.append(notice(f"There is nothing of rank {', '.join(map(str, run.missing[:16]))}."))
    return found


def _figures(a: Analysis) -> str:
    values = {"a step": milliseconds(a.seconds), "samples/s": f"{a.samples_a_second:,.4g}"}
    if a.tokens_a_second is not None:
        values["tokens/s"] = f"{a.tokens_a_second:,.0f}"
    if a.mfu is not None:
        values["of the matrix rate (MFU)"] = f"{a.mfu:.1%}"
    values["computing"] = f"{a.share('compute'):.0%}"
    values["steps recorded"] = str(len(a.steps))
    return facts(values)


def _findings(verdict: Verdict) -> str:
    """Each with its share at the left, and what would help below it."""
    rows = []
    for each in verdict.findings:
        advice = f'<br><span class="dim">{escape(each.advice)}</span>' if each.advice else ""
        share = f'<b>{each.share:.0%}</b><br><span class="dim">{milliseconds(each.seconds)}</span>'
        rows.append(f'<tr><td class="n">{share}</td><td>{escape(each.text)}{advice}</td></tr>')
    return f"<table>{''.join(rows)}</table>" if rows else "<p>Nothing stands out.</p>"


def _changes(verdict: Verdict) -> str:
    if verdict.config is None:
        return ""
    text = f"Written as {CONFIG}. What it brings is a prediction; ds-hf autotune measures."
    return section(
        "The file with these changes",
        side_by_side(verdict.analysis.run.written, verdict.config, ("yours", "suggested")),
        text=text,
    )


def _memory(a: Analysis) -> list[str]:
    record = next((rank.memory for rank in a.run.ranks if rank.memory), None)
    if record is None:
        return []
    text = f"Rank {record['rank']}, step {record['number']}: what the tensors of each kind take on the device."
    return [section("Memory over a step", figures.memory(record), text=text)]


def _kinds(a: Analysis) -> str:
    head = ("kind", "a step", "share", *(f"rank {rank.number}" for rank in a.run.ranks[:16]))
    rows = [
        (
            NAMES[kind],
            milliseconds(seconds),
            f"{seconds / a.seconds:.1%}",
            *(milliseconds(each.get(kind, 0.0)) for each in a.ranks_kinds[:16]),
        )
        for kind, seconds in a.kinds.items()
    ]
    return table(head, rows, numbers=tuple(range(1, len(head))))
