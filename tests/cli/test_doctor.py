"""``ds-hf doctor``: what a person sees, and what a script reads."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ds_hf.cli.root import app
from ds_hf.engine.ops import blocks, cpu, library

OPS = (*library.OPS, *blocks.OPS)


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
