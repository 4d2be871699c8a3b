"""Figures of links between commands: kept, found again, and whatever else lies there ignored with a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ds_hf.measure import links
from ds_hf.measure.links import MeasuredLinks, load_links, save_links

HERE = MeasuredLinks("a GPU", between=1e8, processes=4, hosts=2, backend="gloo", latency=1e-3, packed=1e9)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return links.links_file()


def test_what_was_measured_is_found_on_this_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_links() == (None, "run ds-hf doctor")
    save_links(HERE)
    save_links(MeasuredLinks("a CPU", between=2e6, processes=2))
    found, reason = load_links()
    assert found is not None
    assert (found.device, found.between, reason) == ("a CPU", 2e6, "")  # the latest
    save_links(HERE)
    assert str(load_links()[0]) == "4 processes on 2 hosts over gloo, 100 MB/s each"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert load_links() == (None, "run ds-hf doctor on this host")


def test_a_launch_of_one_and_a_launch_of_several_keep_each_other_s_figures() -> None:
    save_links(HERE)
    save_links(MeasuredLinks("a GPU", neighbours=4e11))
    found, _ = load_links()
    assert found is not None
    assert (found.neighbours, found.between, found.packed) == (4e11, 1e8, 1e9)
    save_links(MeasuredLinks("a GPU", between=3e8, processes=8))
    found, _ = load_links()
    assert found is not None
    assert (found.neighbours, found.between, found.processes) == (4e11, 3e8, 8)


def tree(**entry: object) -> str:
    good = {name: getattr(HERE, name) for name in MeasuredLinks.__dataclass_fields__}
    return json.dumps({"version": 1, "machines": {"x/y": good | entry}})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"version": 1}',
        '{"version": 2, "machines": {}}',
        '{"version": 1, "machines": {"x": 3}}',
        tree(between="fast"),
        tree(between=-1),
        tree(between=float("nan")),
        tree(between=1e300),
        tree(processes=2.5),
        tree(processes=True),
        tree(device="\x1b[2J"),
        tree(device="x" * 10_000),
        tree(more=1),
        "\x00\xff",
    ],
)
def test_what_is_none_of_ours_is_ignored_and_replaced(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found, reason = load_links()
    assert found is None
    assert str(file) in reason
    assert "ignored: run ds-hf doctor" in reason
    save_links(HERE)
    assert load_links()[0] is not None


def test_a_pipe_is_not_waited_for(file: Path) -> None:
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    found, reason = load_links()
    assert found is None
    assert "a pipe" in reason


def test_old_hosts_make_room() -> None:
    for number in range(70):
        save_links(MeasuredLinks(f"device {number}"))
    assert len(json.loads(links.links_file().read_text())["machines"]) == 64
