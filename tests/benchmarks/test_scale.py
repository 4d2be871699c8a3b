"""``benchmarks/scale.py``: what one rank does in a step does not depend on the number of ranks, and the manifest of a
checkpoint grows with it and no faster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"
WORLDS = (16, 128, 256)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, dict[str, Any]]]:
    """By way to divide the states, and number of processes."""
    path = tmp_path_factory.mktemp("scale") / "rows.json"
    arguments = [
        "--worlds",
        ",".join(map(str, WORLDS)),
        "--layers",
        "3",
        "--rounds",
        "1",
        "--ways",
        "stage 2,stage 3,HSDP",
    ]
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--json", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"]:
        found.setdefault(row["way"], {})[row["world"]] = row
    assert list(found) == ["stage 2", "stage 3", "HSDP, inner 8"]
    return found


def test_a_step_is_as_many_calls_at_any_number_of_processes(rows: dict[str, dict[int, dict[str, Any]]]) -> None:
    for way, by_world in rows.items():
        calls = {world: row["calls"] for world, row in by_world.items()}
        assert len(set(calls.values())) == 1, (way, calls)
        assert calls[WORLDS[0]] > 500


def test_what_python_holds_does_not_grow(rows: dict[str, dict[int, dict[str, Any]]]) -> None:
    for way, by_world in rows.items():
        held = [row["memory"]["python"] for row in by_world.values()]
        assert max(held) - min(held) < 1000 * (WORLDS[-1] - WORLDS[0]), (way, held)  # ranks of groups, in lists


@pytest.mark.parametrize("way", ["stage 2", "stage 3"])
def test_the_manifest_grows_with_the_processes(rows: dict[str, dict[int, dict[str, Any]]], way: str) -> None:
    nbytes = [row["manifest"]["nbytes"] for row in rows[way].values()]
    slopes = [
        (more - less) / (larger - smaller)
        for less, more, smaller, larger in zip(nbytes, nbytes[1:], WORLDS, WORLDS[1:], strict=False)
    ]
    assert slopes[1] <= 1.2 * slopes[0], (nbytes, slopes)
    reports = [row["manifest"]["report_nbytes"] for row in rows[way].values()]
    assert max(reports[1:]) <= 1.2 * reports[0], reports
