"""A results folder in which something else lies: the search goes on or starts anew, or says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ds_hf.autotune.inside import search_from_script
from ds_hf.autotune.journal import JOURNAL
from ds_hf.autotune.options import Options
from ds_hf.autotune.run import tune
from ds_hf.autotune.study import TuneError
from ds_hf.errors import ConfigError, DsHfError
from tests.autotune.conftest import FREE, KEPT
from tests.autotune.world import World
from tests.helpers.mutations import LONG, examples, wrong_file

MADE = (
    "search.json",
    "ds_config.tuned.json",
    "ds_config.tuned.reasons.json",
    "command.txt",
    "trials.csv",
    "report.html",
)


def _tune(words: list[str], folder: Path) -> float:
    options = Options(
        results_dir=folder, tune=FREE, fix=KEPT, budget=1e9, processes=4, trials=3, confirm=False, forget=True
    )
    return tune(words, options, run=World().run).best[1].seconds


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, float]:
    """The words of a search, its folder, and what it found."""
    place = tmp_path_factory.mktemp("search")
    (place / "train.py").write_text("raise SystemExit('never started')\n")
    (place / "ds_config.json").write_text(
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", '
        '"zero_optimization": {"stage": 3}}'
    )
    words = [
        str(place / "train.py"),
        "--per_device_train_batch_size",
        "2",
        "--deepspeed",
        str(place / "ds_config.json"),
    ]
    found = _tune(words, place / "results")
    (place / "results/own.lock").write_text("elsewhere 1")
    (place / "results/trials/0").mkdir(exist_ok=True)
    (place / "results/trials/0/pid").write_text("1 1.0")
    return words, place / "results", found


def _still_one(original: Path, journal: Path) -> bool:
    """Whether as many lines as before can be read of it."""
    if journal.is_symlink() or not journal.is_file():
        return False
    lines = journal.read_bytes().splitlines()
    try:
        return all(map(json.loads, lines)) and len(lines) == len(original.read_bytes().splitlines())
    except ValueError:
        return False


def _goes_on_or_says_why(finished: tuple[list[str], Path, float], data: st.DataObject) -> None:
    words, original, found = finished
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(original, Path(name) / "results"))
        (folder / "own.lock").unlink()
        place = data.draw(st.sampled_from([folder / each for each in (JOURNAL, JOURNAL, *MADE)]))
        note(data.draw(wrong_file(place)))
        changed = place.name == JOURNAL and _still_one(original / JOURNAL, place)
        with contextlib.suppress(DsHfError, OSError):
            # launches are counted: where one is lost the best of all may not be reached, but what was there is; where a
            # digit became another, which nothing can tell, what was there is something else
            best = _tune(words, folder)
            assert 0 < best < float("inf") if changed else best <= 1.1 * found


@given(data=st.data())
@examples(8)
def test_a_spoilt_folder_is_gone_on_with_or_refused(
    finished: tuple[list[str], Path, float], data: st.DataObject
) -> None:
    _goes_on_or_says_why(finished, data)


@pytest.mark.slow
@given(data=st.data())
@examples(LONG // 3)
def test_spoilt_folders_are_gone_on_with_or_refused(
    finished: tuple[list[str], Path, float], data: st.DataObject
) -> None:
    _goes_on_or_says_why(finished, data)


@pytest.mark.parametrize("name", [JOURNAL, *MADE])
def test_nothing_is_written_through_a_link(finished: tuple[list[str], Path, float], tmp_path: Path, name: str) -> None:
    words, original, _ = finished
    folder = Path(shutil.copytree(original, tmp_path / "results"))
    (folder / "own.lock").unlink()
    for victim in (tmp_path / "victim", tmp_path / "absent"):
        content = (folder / name).read_bytes() if victim.name == "victim" else b""
        (folder / name).unlink()
        if content:
            victim.write_bytes(content)
        (folder / name).symlink_to(victim)
        with contextlib.suppress(ConfigError):
            _tune(words, folder)
        assert not content or victim.read_bytes() == content
        assert victim.exists() == bool(content)


def test_a_line_of_the_journal_that_was_written_half_is_gone(
    finished: tuple[list[str], Path, float], tmp_path: Path
) -> None:
    """Optuna would append to it, and read nothing ever after."""
    words, original, found = finished
    folder = Path(shutil.copytree(original, tmp_path / "results"))
    (folder / "own.lock").unlink()
    lines = (original / JOURNAL).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(b"".join(lines[:-3]) + lines[-3][:-10])
    for _ in range(2):
        assert _tune(words, folder) == pytest.approx(found)
    assert all(map(json.loads, (folder / JOURNAL).read_bytes().splitlines()))


def test_locks_and_notes_that_are_none(finished: tuple[list[str], Path, float], tmp_path: Path) -> None:
    words, original, found = finished
    for kind in ("empty", "pipe", "endless", "text", "folder"):
        folder = Path(shutil.copytree(original, tmp_path / kind))
        (folder / JOURNAL).unlink()  # so that the lock is asked for
        for place in (folder / "own.lock", folder / "trials/0/pid"):
            place.unlink()
            if kind == "pipe":
                os.mkfifo(place)
            elif kind == "endless":
                place.symlink_to("/dev/zero")
            elif kind == "folder":
                place.mkdir()
            else:
                place.write_text("" if kind == "empty" else "\0 \xff")
            os.utime(place, (1, 1), follow_symlinks=False)
        if kind == "folder":
            with pytest.raises(ConfigError, match=r"own\.lock"):
                _tune(words, folder)
        else:
            assert _tune(words, folder) == pytest.approx(found)


def test_the_reason_of_a_failed_search_may_be_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for content in ('{"reason": "no steps"}', "[]", "{}", "\xff", "[" * 10**5):
        (tmp_path / "failed.json").write_text(content)
        with pytest.raises(TuneError, match="no steps" if "no" in content else "the output of the first process"):
            search_from_script("ds_config.json", {"results_dir": tmp_path})
