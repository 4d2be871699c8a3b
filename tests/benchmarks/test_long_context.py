"""``benchmarks/long_context.py --cpu``: every engine trains the same model, whatever saves memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_context.py"
pytestmark = pytest.mark.slow


def test_losses_agree(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--cpu", "--json", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["part"] for row in rows] == ["peak", "offload", "longest"]
    for row in rows[:2]:
        first, *others = row["records"]
        assert others
        for record in others:
            assert record["error"] is None, record
            assert record["losses"] == pytest.approx(first["losses"], abs=2e-3), record["name"]
    for record in rows[2]["records"]:
        assert record["longest"] == 1024, record
