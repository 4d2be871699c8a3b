"""The page of a search."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ds_hf.autotune.lr import closing_line, report
from ds_hf.autotune.lr.report import fitted
from ds_hf.lr import Decision, Landmarks, LrResult, PlannedRun, RunResult
from tests.autotune.lr.test_figure import result
from tests.helpers.browser import faults_of, needs_chromium
from tests.helpers.pages import without_breaks


def searched() -> LrResult:
    """Longer runs whose mean losses lie on a parabola around 0.02."""
    rates = [0.005, 0.01, 0.02, 0.04]
    runs = [RunResult(PlannedRun(lr, 100, seed), 1 + math.log10(lr / 0.02) ** 2) for lr in rates for seed in (0, 1)]
    runs += [RunResult(PlannedRun(0.1, 50, 0), math.inf)]
    made = result(runs=tuple(runs))
    marks = Landmarks(1e-4, 1e-2, 0.1, True, None, 2e-3, 1.5)
    return LrResult.of(marks, Decision(0.02, 0.01, 0.03, "of runs of 100 updates <it> was best"), sweeps=made.sweeps,
                       runs=made.runs, optimizer="AdamW", cycles_momentum=True, total_steps=200, updates=1234,
                       seconds=61.0, notes=("a shorter search: too few batches",))  # fmt: skip


class _Tags(HTMLParser):
    """Fails on a tag that is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "wbr", "col"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_says_what_why_and_how() -> None:
    text = report(searched(), ["train.py", "--deepspeed", "a<b.json"])
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    text = without_breaks(text)
    assert '<p class="headline warn">Train with a learning rate of 0.02 for 200 updates</p>' in text
    assert "Of runs of 100 updates &lt;it&gt; was best." in text
    assert "a shorter search: too few batches" in text
    assert "train.py --deepspeed a&lt;b.json" in text
    boxes = [re.sub("<.*?>", "", box) for box in re.findall(r'<div class="copied"><pre>(.*?)</pre>', text, re.S)]
    assert "--learning_rate 0.02 --lr_scheduler_type linear --warmup_steps 12" in boxes
    assert len(boxes) == 8  # four schedules, each as arguments and as JSON
    for label in ("suggested 0.02", "valley 0.002", "breaks 0.1", "parabola through the best and its neighbours"):
        assert label in text
    assert text.count("<svg") == 2
    assert len(text) < 200_000
    assert "http" not in text.replace("http://www.w3.org", "")


@needs_chromium
@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    command = (
        "/home/someone/experiments/train_instructions.py --per_device_train_batch_size 4 --deepspeed ds_config.json"
    )
    page = tmp_path / "lr_report.html"
    page.write_text(report(searched(), command.split()), "utf-8")
    assert faults_of(page, "lr-find") == []


def test_the_fit_is_the_one_that_chose() -> None:
    fit = fitted(searched())
    assert fit is not None
    rates, losses = fit
    assert (rates[0], rates[-1]) == pytest.approx((0.01, 0.04))
    assert rates[losses.index(min(losses))] == pytest.approx(0.02, rel=0.02)
    assert losses[0] == pytest.approx(1 + math.log10(2) ** 2)
    assert fitted(result(runs=())) is None
    assert fitted(result(runs=(RunResult(PlannedRun(0.1, 50, 0), math.inf),))) is None


def test_a_range_test_alone_has_one_chart() -> None:
    text = without_breaks(report(result(runs=(), total_steps=None)))
    assert text.count("<svg") == 1
    assert "With --total-steps N" in text


def test_the_last_line() -> None:
    assert closing_line(searched(), "out/lr_report.html") == (
        "Train with a learning rate of 0.02 for 200 updates: --learning_rate 0.02 --lr_scheduler_type linear "
        "--warmup_steps 12 (report: out/lr_report.html)"
    )
