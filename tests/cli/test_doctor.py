"""``ds-hf doctor``: what a person sees, and what a script reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_hf.cli.root import app
from ds_hf.engine.ops import blocks, cpu, library

OPS = (*library.OPS, *blocks.OPS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_operator_has_a_line() -> None:
    output = run()
    for name in OPS:
        assert f"ds_hf::{name} " in output
    assert "served by ds_hf" in output


def test_json() -> None:
    report = json.loads(run("--json"))
    assert {op["name"] for op in report["operators"]} == {f"ds_hf::{name}" for name in OPS}
    assert all(op["implementation"] == "plain torch" or not op["reason"] for op in report["operators"])


def test_a_missing_library_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: "no C++ compiler when ds_hf was installed: install g++")
    output = run()
    assert "no kernel library, torch computes" in output
    assert "-> no C++ compiler when ds_hf was installed: install g++" in output
    assert output.count("plain torch") >= len(OPS)


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "not kept" in run("--no-disk")


@pytest.mark.slow
def test_processes_of_a_launch_time_their_link_and_explain_reads_it(cache: Path) -> None:
    config = cache / "ds.json"
    config.write_text('{"train_batch_size": 2, "zero_optimization": {"stage": 2, "zero_quantized_gradients": true}}')

    def last_line() -> str:
        result = CliRunner().invoke(app, ["config", "explain", str(config)])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()[-1]

    assert last_line() == "for seconds on your links: run ds-hf doctor"
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ds_hf.cli", "doctor", "--no-disk"]
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, timeout=200)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("processes ")]
    assert "2 processes on one host over gloo" in line
    assert "2 processes on one host over gloo" in last_line()
    (cache / "ds_hf" / "links.json").write_text("{}")
    assert "is ignored: run ds-hf doctor" in last_line()
