"""The page, the trace and the words that are made of a folder; runs that end too early; a real browser."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from rich.console import Console

from ds_hf.autotune.charts import LETTER
from ds_hf.errors import DsHfError
from ds_hf.profile import load
from ds_hf.profile.analysis import analyse
from ds_hf.profile.cli import _fitting
from ds_hf.profile.figures import heat_map, segments, typical_step
from ds_hf.profile.load import read_run
from ds_hf.profile.report import report_html, write_report
from ds_hf.profile.verdict import judge
from tests.engine.observe.report.common import make_engine, train
from tests.helpers.browser import faults_of, needs_chromium
from tests.helpers.distributed import free_port, run_distributed
from tests.helpers.interpreter import python
from tests.helpers.mutations import LONG, QUICK, examples, wrong_file
from tests.helpers.patience import patient

ROOT = Path(__file__).parents[2]
SECTIONS = ["What limits it", "From the floor to a step", "A step over the ranks", "Ranks that others wait for",
            "Memory over a step", "Over time", "All kinds", "In words"]  # fmt: skip


def small_run(folder: Path) -> None:
    engine = make_engine(3, folder)
    train(engine, 5)
    engine.destroy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    run_distributed(small_run, 2, path)
    return path


class Checker(HTMLParser):
    """Whether all tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


def test_what_is_written(folder: Path) -> None:
    verdict = write_report(folder)
    page = (folder / "report.html").read_text("utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert re.findall(r"<h2>([^<]*)</h2>", page)[: len(SECTIONS) + 2] >= ["What limits it"]
    assert [title for title in re.findall(r"<h2>([^<]*)</h2>", page) if title in SECTIONS] == SECTIONS
    assert checker.count["svg"] >= 5
    assert not re.search(r"(src|href)=|https?://", page), "it opens without a network"
    assert "nan" not in re.sub(r"<title>.*?</title>", "", page)
    words = (folder / "verdict.txt").read_text("utf-8")
    assert words.startswith("where the time went (steps 3 to 5, 3 of them recorded):\na step takes ")
    assert words.rstrip().endswith(f"report: {folder / 'report.html'}")
    assert verdict.analysis.tokens == 2 * 16
    assert 0 < (verdict.analysis.mfu or 0) < 1


def test_memory_adds_up_and_its_peak_is_named(folder: Path) -> None:
    record = read_run(folder).ranks[1].memory
    assert record is not None
    assert record["number"] == 2
    totals = [sum(point[1:]) for point in record["points"]]
    assert max(totals) == record["peak"]
    place = record["places"][totals.index(max(totals))]
    assert place.startswith(("before ", "after ")), place
    parameters = [point[1] for point in record["points"]]
    assert max(parameters) > min(parameters), "at stage 3 they are gathered and released"
    assert len({point[2] for point in record["points"]}) == 1  # the optimizer's stay


def test_the_trace_has_every_span_of_every_rank(folder: Path) -> None:
    write_report(folder)
    events = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    run = read_run(folder)
    spans = [event for event in events if event["ph"] == "X"]
    expected = sum(1 + len(rank.steps[number].spans) for rank in run.ranks for number in (3, 4, 5))
    assert len(spans) == expected
    assert {event["pid"] for event in spans} == {0, 1}
    assert min(event["ts"] for event in spans) == 0
    assert any(event["name"] == "all-gather of the weights of blocks.1" for event in spans)
    for rank in (0, 1):
        own = [event for event in spans if (event["pid"], event["tid"]) == (rank, 0)]
        times = [(round(10 * event["ts"]), round(10 * event["ts"]) + round(10 * event["dur"])) for event in own]
        open_: list[int] = []
        for begin, end in sorted(times, key=lambda each: (each[0], -each[1])):
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1], "spans of a track are inside or beside each other"
            open_.append(end)


def test_segments_fill_the_step(folder: Path) -> None:
    run = read_run(folder)
    analysis = analyse(run)
    number = typical_step(analysis)
    assert number in analysis.steps
    for rank in run.ranks:
        found = segments(rank, rank.steps[number])
        assert found[0][2] == 0
        assert all(before[3] == after[2] for before, after in pairwise(found))
        assert found[-1][3] == pytest.approx(rank.steps[number].seconds, abs=1e-6)
    assert sum(analysis.kinds.values()) == pytest.approx(analysis.seconds, rel=1e-3)


def test_a_line_that_was_cut_off_and_a_rank_that_is_missing_are_told(folder: Path, tmp_path: Path) -> None:
    text = (folder / "rank_00000.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    (tmp_path / "rank_00000.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-2][:40])
    run = read_run(tmp_path)
    assert run.missing == [1]
    assert not run.ended
    page = report_html(judge(analyse(run)))
    assert "There is nothing of rank 1." in page
    assert "The run had not ended" in page


def test_leaning_names_stay_inside_the_plot(folder: Path) -> None:
    drawn = heat_map(analyse(read_run(folder)))
    names = re.findall(r'transform="rotate\(-50 (\d+) \d+\)">([^<]+)<', drawn)
    assert len(names) > 4
    assert all(float(x) - LETTER * len(name) * math.cos(math.radians(50)) > -1 for x, name in names)


def test_a_line_fits_beside_the_spinner() -> None:
    console = Console(width=40)
    assert str(_fitting("step 5: 224 ms", console)) == "step 5: 224 ms"
    cut = str(_fitting("step 5: 224 ms, 1,145 tokens/s a rank (forward and backward 63%)", console))
    assert cut == "step 5: 224 ms, 1,145 tokens/s a ran…"


def test_a_folder_without_a_report_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DsHfError, match=r'has no report: a run writes one there with "ds_hf": \{"report"'):
        read_run(tmp_path)


def test_what_may_not_be_read_is_not_to_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(load, "open_regular", refused)
        with pytest.raises(
            DsHfError, match=r"rank_00000\.jsonl cannot be read \(Permission denied\): let its owner allow it"
        ):
            read_run(folder)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DsHfError, match=f"{folder} cannot be read"):
        read_run(folder)


@needs_chromium
@pytest.mark.slow
def test_in_a_browser(folder: Path) -> None:
    write_report(folder)
    assert faults_of(folder / "report.html", "profile") == []


SCRIPT = """
import sys
import torch
import ds_hf
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config
folder, ending = sys.argv[1:]
engine = ds_hf.initialize(model=TinyLM(), config=base_config(2, ds_hf={"report": folder, "report_steps": "all"}))[0]
step = 0
while True:
    engine.backward(engine(token_batches(1, 16)))
    engine.step()
    step += 1
    if step == 5 and ending == "raise":
        raise RuntimeError("the script's own fault")
    if step == 5 and ending == "return":
        break
"""


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port())}  # fmt: skip


def wait_for(what: Path, seconds: float) -> None:
    until = time.monotonic() + patient(seconds)
    while not what.exists():
        assert time.monotonic() < until, f"{what} does not come"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_its_page(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "never"],
        env=surroundings(), stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip
    file = tmp_path / "rank_00000.jsonl"
    try:
        wait_for(file, 60)
        until = time.monotonic() + patient(60)
        while file.read_bytes().count(b'{"step"') < 5 and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_for(tmp_path / "verdict.txt", 30)
    assert "The run had not ended" in (tmp_path / "report.html").read_text("utf-8")
    assert (tmp_path / "verdict.txt").read_text("utf-8").startswith("where the time went (steps 3 to ")


@pytest.mark.parametrize("ending", [pytest.param("return", marks=pytest.mark.slow), "raise"])
def test_the_end_of_a_run_tells_where_the_time_went(tmp_path: Path, ending: str) -> None:
    done = python("-c", SCRIPT, str(tmp_path), ending, env=surroundings())
    assert ("the script's own fault" in done.stderr) == (ending == "raise")
    assert "where the time went (steps 3 to 5, 3 of them recorded):" in done.stdout
    assert f"report: {tmp_path / 'report.html'}" in done.stdout
    assert "had not ended" not in (tmp_path / "report.html").read_text("utf-8")


# -- folders of strangers -------------------------------------------------------------------------------------------


def _loads_or_is_refused(folder: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for file in folder.glob("rank_*.jsonl"):
            shutil.copy(file, place)
        note(data.draw(wrong_file(data.draw(st.sampled_from(sorted(place.iterdir()))))))
        with contextlib.suppress(DsHfError):
            write_report(place)


def test_half_a_character_is_an_escape_on_the_page(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("rank_*.jsonl"):
        text = re.sub(r'("memory":1,"rank":)\d+', r'\1"\\ud800"', file.read_text("utf-8"))
        assert "ud800" in text
        (tmp_path / file.name).write_text(text, "utf-8")
    write_report(tmp_path)
    assert r"\ud800" in (tmp_path / "report.html").read_text("utf-8")


@given(data=st.data())
@examples(QUICK)
def test_a_spoilt_folder_gives_a_page_or_a_sentence(folder: Path, data: st.DataObject) -> None:
    _loads_or_is_refused(folder, data)


@pytest.mark.slow
@given(data=st.data())
@examples(LONG)
def test_spoilt_folders_give_pages_or_sentences(folder: Path, data: st.DataObject) -> None:
    _loads_or_is_refused(folder, data)


def test_links_in_the_folder_are_not_written_through(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place = tmp_path / "report"
    place.mkdir()
    for file in folder.glob("rank_*.jsonl"):
        shutil.copy(file, place)
    names = ("trace.json", "report.html", ".report.html.new", "verdict.txt", "suggested.json")
    for name in names:
        (place / name).symlink_to(precious)
    write_report(place)
    assert precious.read_text() == "precious"
    assert "traceEvents" in (place / "trace.json").read_text()
