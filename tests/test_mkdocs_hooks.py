"""What the pages of the site get after Markdown."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from mkdocs_hooks import on_page_content, on_page_markdown

HEAD = "<table><thead><tr><th>Key</th><th>Type</th><th></th></tr></thead>"


def test_code_gives_way_between_its_parts_and_blocks_stay() -> None:
    block = '<pre><span></span><code>"zero_optimization": 1.5</code></pre>'
    made = on_page_content(f"{block}<p>a_b <code>zero_optimization.stage=1.5</code></p>")
    key = '<code>zero_<wbr class="inner">optimization.<wbr>stage=<wbr>1.5</code>'
    assert made == f"{block}<p>a_b {key}</p>"


def test_how_to_pages_come_first_in_the_search() -> None:
    for name, boosted in (("how-to/nan.md", True), ("api.md", False)):
        page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        assert on_page_markdown("# NaN", page=page) == "# NaN"
        assert ("search" in page.meta) == boosted


def test_symbols_of_the_api_give_way_too() -> None:
    name = '<span class="doc doc-object-name doc-class-name">'
    assert on_page_content(f"<h3>{name}ds_hf.Engine</span></h3>").endswith("hf.<wbr>Engine</span></h3>")


def test_a_table_of_words_has_its_heads_in_its_cells() -> None:
    rows = "<tr><td>stage</td><td>integer</td><td>What is divided over the processes, of 4</td></tr>"
    made = on_page_content(f"{HEAD}<tbody>{rows}</tbody></table>")
    assert made.startswith('<table data-of="words">')
    cells = re.findall(r"<td.*?>", made)
    assert cells == ["<td>", '<td data-label="Type" class="short">', "<td>"]


def test_a_table_of_figures_and_one_of_two_columns_stay_tables() -> None:
    rows = "<tr><td>stage 2</td><td>1.5 ms</td><td>3 %</td></tr><tr><td>stage 3</td><td>12</td><td>none</td></tr>"
    made = on_page_content(f"{HEAD}<tbody>{rows}</tbody></table>")
    assert made == f"{HEAD}<tbody>{rows}</tbody></table>".replace("<table>", '<table data-of="figures">')
    two = "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>c</td><td>d</td></tr></tbody></table>"
    assert on_page_content(two) == two
