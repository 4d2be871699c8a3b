"""The skeleton of the reports: one file that opens without a network, in light and dark, in wide and narrow windows.

``page`` puts sections into it; the helpers make what stands in them. All text is escaped here, so callers pass plain
text; only what is called ``html`` is taken as it is.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["code", "facts", "give_way", "notice", "page", "section", "side_by_side", "table"]

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --dim: #5b6773; --paper: #fff; --soft: #f2f4f7; --line: #d8dee4;
  --good: #1a7f37; --good-soft: #e6f4ea; --warn: #9a6700; --warn-soft: #fff6d6; --old: #fdeaea; --new: #e6f4ea;
  --shade: #0003; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --dim: #9aa7b4; --paper: #14191f; --soft: #1f262e;
  --line: #36404a; --good: #56d364; --good-soft: #17301f; --warn: #e3b341; --warn-soft: #332a10; --old: #3d1f21;
  --new: #17301f; --shade: #000a; } .chart, .chip { filter: brightness(1.15); } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: break-word; }
h1 { font-size: 1.15rem; font-weight: 600; color: var(--dim); margin: 0; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.headline { font-size: 1.7rem; line-height: 1.25; font-weight: 650; margin: .3rem 0 .4rem; }
.dim { color: var(--dim); } .good { color: var(--good); } .warn { color: var(--warn); }
/* A shade at the edge behind which there is more: paper that moves along covers it at the ends. */
.wide { overflow-x: auto; background: linear-gradient(to right, var(--paper) 40%, transparent) 0 0 / 3rem 100% local,
  linear-gradient(to left, var(--paper) 40%, transparent) 100% 0 / 3rem 100% local,
  linear-gradient(to right, var(--shade), transparent) 0 0 / .8rem 100% scroll,
  linear-gradient(to left, var(--shade), transparent) 100% 0 / .8rem 100% scroll; background-repeat: no-repeat; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top;
  border-bottom: 1px solid var(--line); } th { font-weight: 600; color: var(--dim); }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } th.n { text-align: right; }
tr.best td { background: var(--good-soft); }
.word { display: inline-block; max-width: 100%; white-space: nowrap; } .word wbr { white-space: normal; }
code { background: var(--soft); padding: .1rem .3rem; border-radius: 3px; }
pre { background: var(--soft); padding: .7rem; border-radius: 5px; white-space: pre-wrap;
  margin: 0; font-size: .87rem; }
.copied { position: relative; margin: .4rem 0; } .copied pre { padding-right: 4.6rem; }
button { position: absolute; top: .4rem; right: .4rem; font: inherit; font-size: .8rem; padding: .1rem .6rem;
  border: 1px solid var(--line); border-radius: 4px; background: var(--paper); color: var(--ink); cursor: pointer; }
.facts { display: flex; gap: 1rem 2.5rem; flex-wrap: wrap; margin: 1.1rem 0; } .facts div { min-width: 7rem; }
.facts span { display: block; color: var(--dim); font-size: .87rem; } .facts b { font-size: 1.2rem; font-weight: 600; }
.notice { border-left: 4px solid var(--warn); background: var(--warn-soft); padding: .5rem .8rem; margin: .8rem 0; }
.chart { display: block; width: 100%; min-width: 620px; height: auto; font: 12.5px system-ui, sans-serif; }
.chart text:not([fill]) { fill: var(--ink); } .chart text.inside { fill: #fff; } .chart text.mark { font-weight: 600; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1rem; }
.beside .chart { min-width: 0; }
.chart .grid { stroke: var(--line); fill: none; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(17rem, 1fr)); gap: 0;
  font: .85rem/1.45 ui-monospace, monospace; background: var(--soft); border-radius: 5px; overflow-x: auto; }
.pair > div { padding: 0 .7rem; white-space: pre-wrap; min-height: 1.45em; }
.pair > div.head { font: 600 .87rem system-ui, sans-serif; color: var(--dim); padding: .4rem .7rem; }
.pair .old { background: var(--old); } .pair .new { background: var(--new); }
details > summary { cursor: pointer; color: var(--dim); margin: .6rem 0; }
@media (min-width: 641px) { td:first-child wbr.inner { display: none; } }
/* A table of words falls apart into a card a row; one of figures scrolls, its first column staying. */
@media (max-width: 640px) { .pair { grid-template-columns: minmax(0, 1fr); } .pair .again { display: none; }
  body { margin: 1rem auto; } .headline { font-size: 1.35rem; } .facts { gap: .8rem 1.4rem; }
  .wide > .chart { min-width: 760px; } .copied pre { padding: 2.3rem .7rem .7rem; } th, td { padding: .3rem .4rem; }
  .words, .words tbody, .words tr { display: block; } .words tr:has(th), .words colgroup { display: none; }
  .words tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .words td { display: block; border: 0; padding: .1rem .4rem; text-align: left; white-space: normal; }
  .words td.n { display: inline-block; } .words td:empty { display: none; }
  .words td[data-label]::before { content: attr(data-label) " "; color: var(--dim); }
  tr > :first-child { position: sticky; left: 0; } tr:not(.best) > :first-child { background: var(--paper); } }
@media print { button { display: none; } }
"""
SCRIPT = """
document.querySelectorAll('.copied').forEach(box => {
  const button = document.createElement('button');
  button.textContent = 'Copy';
  button.onclick = async () => {
    const text = box.querySelector('pre').textContent;
    try { await navigator.clipboard.writeText(text); }
    catch {  // a file that was opened from the disk may not have the clipboard
      const area = document.createElement('textarea');
      area.value = text; document.body.append(area); area.select(); document.execCommand('copy'); area.remove();
    }
    button.textContent = 'Copied';
    setTimeout(() => button.textContent = 'Copy', 1500);
  };
  box.append(button);
});
"""


def page(title: str, headline: str, body: Sequence[str], *, about: str = "", tone: str = "") -> str:
    """The whole file.

    Args:
        title: names the page. headline: the result in one line. about: small print below it.
        body: HTML of sections. tone: "good" or "warn" colours the headline.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>{_text(title)}</h1><p class="headline {tone}">{_text(headline)}</p>'
        f'<p class="dim">{_text(about)}</p>{"".join(body)}<script>{SCRIPT}</script></body></html>\n'
    )


def section(title: str, *html: str, text: str = "") -> str:
    """A heading with what follows it; ``text`` explains it in a sentence. Charts and tables scroll by themselves."""
    explained = f'<p class="dim">{_text(text)}</p>' if text else ""
    parts = "".join(f'<div class="wide">{each}</div>' if each.startswith("<svg") else each for each in html)
    return f"<h2>{escape(title)}</h2>{explained}{parts}"


def facts(values: Mapping[str, str]) -> str:
    """A few figures beside each other, each with its name."""
    shown = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in values.items())
    return f'<div class="facts">{shown}</div>'


def notice(text: str) -> str:
    """Something that a reader must not overlook."""
    return f'<p class="notice">{_text(text)}</p>'


def code(text: str) -> str:
    """Text with a button that copies it."""
    return f'<div class="copied"><pre>{_text(text)}</pre></div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), best: int = -1) -> str:
    """Cells of plain text; one between backquotes is shown as code.

    Args:
        numbers: columns that are aligned to the right. best: row that is marked.
    """
    mark = [' class="n"' if index in numbers else "" for index in range(len(head))]
    kind = "figures" if len(head) < 3 or 2 * len(numbers) >= len(head) - 1 else "words"
    label = [f' data-label="{escape(name)}"' if index and kind == "words" else "" for index, name in enumerate(head)]
    top = "".join(f"<th{mark[index]}>{escape(name)}</th>" for index, name in enumerate(head))
    body = "".join(
        f"<tr{' class=best' if index == best else ''}>"
        + "".join(f"<td{mark[column]}{label[column]}>{_cell(cell)}</td>" for column, cell in enumerate(row))
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    if len(text) > 2 and text[0] == text[-1] == "`":
        return f"<code>{_text(text[1:-1])}</code>"
    return _text(text)


def _text(text: str) -> str:
    return give_way(escape(text))


def give_way(html: str) -> str:
    """Text of a page, escaped, whose long words break between their parts: keys at dots and underscores, paths at
    slashes. Browsers would break them at hyphens alone: 1e-05 and --option stay in one piece."""
    words = re.sub(r"(?<!\S)(?=\S{1,50}(?!\S))\S*-\S*", r'<span class="word">\g<0></span>', html)
    return re.sub(r"(?<=\w)(?:(_+|/|=|\|)|[.,:](?=[^\W\d]))(?=\w)", _seam, words)


def _seam(found: re.Match[str]) -> str:
    return f'{found[0]}<wbr class="inner">' if found[0][0] == "_" else f"{found[0]}<wbr>"


def side_by_side(old: Mapping[str, Any], new: Mapping[str, Any], names: tuple[str, str] = ("yours", "tuned")) -> str:
    """Two JSON objects line by line, with what differs marked; below each other, once, where the page is narrow."""
    before, after = (json.dumps(each, indent=2).splitlines() for each in (old, new))
    cells = [
        f'<div class="head{mark}">{escape(name)}</div>' for name, mark in zip(names, (" old", " new"), strict=True)
    ]
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        left, right = before[a:b], after[c:d]
        for index in range(max(len(left), len(right))):
            cells.append(_line(left, index, "" if tag == "equal" else "old"))
            cells.append(_line(right, index, "again" if tag == "equal" else "new"))
    return f'<div class="pair">{"".join(cells)}</div>'


def _line(lines: Sequence[str], index: int, mark: str) -> str:
    if index >= len(lines):
        return '<div class="again"></div>'
    return f'<div class="{mark}">{_text(lines[index])}</div>'
