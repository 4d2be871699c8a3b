"""The suite's limits leave a slow machine time, and one that is reached names its test and stops nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import LONGEST_S, patient

ROOT = Path(__file__).parents[2]


def test_limits_of_helpers_lie_below_pytests_own(request: pytest.FixtureRequest) -> None:
    """The helpers show the stacks of every process; pytest's limit knows only its own."""
    assert request.config.getini("timeout_method") == "signal"  # "thread" ends the worker with os._exit
    assert float(request.config.getini("timeout")) > LONGEST_S
    assert [patient(6), patient(6, 1), patient(280), patient(2000)] == [60, 6, LONGEST_S, 2000]


def test_a_limit_that_is_reached_is_a_failure_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_hangs():\n    time.sleep(600)\ndef test_next():\n    pass\n"
    )
    words = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-o", "timeout=1", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, cwd=tmp_path)
    assert "Failed: Timeout (>1.0s)" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
