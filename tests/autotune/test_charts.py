"""Charts: where things stand in the picture, and that any value can be drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ds_hf.autotune.charts import Band, Bar, ChartAxis, Mark, Series, bars, xy


def circles(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    return [(float(x), float(y)) for x, y in found]


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("text")]


def test_logarithmic_axes_keep_ratios() -> None:
    (a, _), (b, _), (c, _) = circles(
        xy([Series([1, 10, 100], [1, 2, 3], marks=True)], ChartAxis(log=True), ChartAxis())
    )
    assert b - a == pytest.approx(c - b, abs=0.2)


def test_larger_values_are_higher_and_ticks_are_round() -> None:
    svg = xy([Series([0, 1], [0.0, 50.0], marks=True)], ChartAxis("step"), ChartAxis("loss", low=0))
    (_, low), (_, high) = circles(svg)
    assert high < low
    assert {"0", "10", "50", "step", "loss"} <= set(texts(svg))


@pytest.mark.parametrize(
    "values", [[1.0, float("nan"), 2.0], [None, 1.0, float("inf")], [5.0, 5.0, 5.0], [0.0] * 3, [1e308, -1e308, 1e-320]]
)
@pytest.mark.parametrize("log", [False, True])
def test_gaps_and_equal_values_are_drawn(values: list[float | None], log: bool) -> None:
    svg = xy([Series([1, 2, 3], values, marks=True)], ChartAxis(log=log), ChartAxis(log=log))
    ElementTree.fromstring(svg)
    assert "nan" not in svg
    assert "inf" not in svg


def test_labels_are_escaped_and_neighbours_stand_apart() -> None:
    marks = [Mark(1.0, "valley <i>"), Mark(1.01, "steepest"), Mark(9.0, "at the very end of the picture")]
    svg = xy([Series([0, 9], [0, 1])], ChartAxis(), ChartAxis(), marks=marks, bands=[Band(1, 2)])
    nodes = [node for node in ElementTree.fromstring(svg).iter("text") if node.get("class") == "mark"]
    assert [node.text for node in nodes] == ["valley <i>", "steepest", "at the very end of the picture"]
    assert nodes[0].get("y") != nodes[1].get("y")
    assert nodes[2].get("text-anchor") == "end"


def test_bars_share_rows_by_label() -> None:
    svg = bars([Bar("a", 0, 1, text="one"), Bar("a", 1, 4), Bar("b", 2, 4, note="x & y")], ChartAxis(low=0, high=4))
    rows = [(float(node.get("y", "")), float(node.get("width", ""))) for node in ElementTree.fromstring(svg)
            if node.tag == "rect"]  # fmt: skip
    assert rows[0][0] == rows[1][0] < rows[2][0]
    assert rows[1][1] == pytest.approx(3 * rows[0][1], abs=0.3)
