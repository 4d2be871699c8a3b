"""The page that both reports use."""

from __future__ import annotations

import re

from ds_hf.autotune.page import code, facts, notice, page, section, side_by_side, table


def test_nothing_is_fetched_and_everything_is_escaped() -> None:
    body = [section("A <b>", "<svg></svg>", text="1 < 2"), code("rm <x>"), notice("<n>"), facts({"<k>": "<v>"})]
    text = page("title <t>", "head <h>", body, about="<a>", tone="good")
    assert "http" not in text
    assert "src=" not in text
    for raw in ("A <b>", "rm <x>", "<n>", "<k>", "<v>", "<t>", "<h>", "<a>"):
        assert raw not in text
    assert len(text) < 20_000


def test_table_marks_code_and_the_best_row() -> None:
    text = table(["key", "value"], [["`a.b`", "1"], ["c", "`"]], numbers=[1], best=0)
    assert "<tr class=best><td><code>a.<wbr>b</code></td>" in text
    assert '<td class="n">`</td>' in text


def test_long_words_give_way_between_their_parts_and_figures_do_not() -> None:
    text = table(["key", "why", "to free it"], [["`zero_optimization.stage`", "1.5 ms at 0.2", "--tune a.b"]])
    assert '<td><code>zero_<wbr class="inner">optimization.<wbr>stage</code></td>' in text
    assert '<td data-label="why">1.5 ms at 0.2</td>' in text
    assert '<td data-label="to free it"><span class="word">--tune</span> a.<wbr>b</td>' in text


def test_short_words_are_not_broken_at_hyphens() -> None:
    text = code(f"x --lr 1e-05 {'a-' * 40}b")
    assert re.findall(r'<span class="word">(.*?)</span>', text) == ["--lr", "1e-05"]
    assert re.sub("<.*?>", "", text) == f"x --lr 1e-05 {'a-' * 40}b"  # what the button copies


def test_json_side_by_side_marks_what_differs() -> None:
    text = side_by_side({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 4}})
    assert re.findall(r'<div class="old">\s*(.*?)</div>', text) == ["&quot;c&quot;: 2"]
    assert re.findall(r'<div class="new">\s*(.*?)</div>', text) == ["&quot;c&quot;: 3,", "&quot;d&quot;: 4"]
    left_and_right = text.count("<div") - 1
    assert left_and_right % 2 == 0
