"""What pages of the site get after Markdown: code that breaks between its parts, and tables for narrow windows.

``docs/css/site.css`` says how both look. mkdocs calls ``on_page_markdown`` and ``on_page_content`` for every page.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from ds_hf.autotune.page import give_way

__all__ = ["on_page_content", "on_page_markdown"]

CODE = re.compile(r'(<pre\b.*?</pre>)|(<code>|<span class="doc doc-object-name [^>]*>)([^<]+)', re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])([^>]*)>(.*?)</\1>", re.DOTALL)
FIGURE = re.compile(r"^(?=.{1,16}$).*(?<!\w)\d")
SHORT = 16  # letters of a cell that stands beside others


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """How-to pages come first in the search: "checkpoint" found two classes of errors before the page about them."""
    if page.file.src_uri.startswith("how-to/"):
        page.meta.setdefault("search", {"boost": 4})
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML with places to break in its code, and with marks on its tables."""
    return TABLE.sub(lambda found: _table(found[0]), CODE.sub(_code, html))


def _code(found: re.Match[str]) -> str:
    if found[1]:
        return found[1]
    return found[2] + give_way(found[3])


def _table(html: str) -> str:
    """One of words falls apart into a card a row where the window is narrow; one of figures scrolls, its first column
    staying."""
    rows = [[_plain(cell[3]) for cell in CELL.finditer(row)] for row in ROW.findall(html)]
    head, body = rows[0], rows[1:]
    if len(head) < 3 or not body:
        return html
    cells = [cell for row in body for cell in row[1:]]
    if sum(bool(FIGURE.search(cell)) for cell in cells) * 2 >= len(cells):
        return html.replace("<table>", '<table data-of="figures">', 1)
    short = [sum(len(row[column]) for row in body) <= SHORT * len(body) for column in range(len(head))]

    def row_of(found: re.Match[str]) -> str:
        columns = iter(range(len(head)))
        return CELL.sub(lambda cell: cell_of(cell, next(columns)), found[0])

    def cell_of(found: re.Match[str], column: int) -> str:
        if found[1] == "th":
            return found[0]
        label = f' data-label="{head[column]}"' if column and head[column] else ""
        kind = ' class="short"' if column and short[column] else ""
        return f"<td{found[2]}{label}{kind}>{found[3]}</td>"

    return ROW.sub(row_of, html).replace("<table>", '<table data-of="words">', 1)


def _plain(html: str) -> str:
    return unescape(re.sub("<.*?>", "", html)).strip().replace('"', "")
