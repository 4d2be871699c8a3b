"""``benchmarks/slow_link.py`` end to end: bytes between two namespaces are those of the formulas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slow_link import missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def test_bytes_follow_the_formulas(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = [sys.executable, "benchmarks/slow_link.py", "--rates", "1000", "--ranks", "1", "--out", str(out)]
    subprocess.run(words, check=True, timeout=500)
    rows = {row["way"]: row for row in map(json.loads, out.read_text().splitlines()) if row["rate"] == 1000}
    for row in rows.values():
        assert row["bytes"] == pytest.approx(row["formula"], rel=0.06, abs=0.01)  # headers
    assert rows["1-bit Adam, stage 0"]["bytes"] <= 0.075 * rows["Adam, stage 0 (all-reduce of bf16)"]["bytes"]
