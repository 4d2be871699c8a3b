"""``benchmarks/generation.py --check``: every way to decode gives the same tokens, with small shapes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "generation.py"


@pytest.mark.slow
def test_every_way_gives_the_same_tokens() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "tokens are those of transformers with the same values"
    rows = [json.loads(line) for line in lines if line.startswith('{"model')]
    bits = ["int8", "int4", "blocks8", "blocks4"]
    assert [row["engine"] for row in rows] == ["eager", "ds_hf", "graph", "static", *bits, "bf16"]
    smaller = [rows[0]["held_gb"] / row["held_gb"] for row in rows[4:8]]
    assert smaller == pytest.approx([3.8, 7.1] * 2, rel=0.1)
    assert all(isinstance(row["ms_a_token"], float) for row in rows)
