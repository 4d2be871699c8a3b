"""The runner of DeepSpeed's own tests, on a checkout of four small tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.started import ForkedProgram
from tests.tools import deepspeed_tests

_TESTS = """
from deepspeed.zero import Init
from deepspeed.runtime.zero.stage3 import (
    DeepSpeedZeroOptimizer_Stage3,
    no_such_internal as renamed,
)
import deepspeed.no_such_module as gone


def test_passes():
    assert Init.__name__ == "Init"


def test_fails():
    raise ValueError("told")


def test_uses_an_internal():
    renamed(3)


def test_uses_a_module():
    gone.thing
"""


def test_what_ds_hf_lacks_fails_only_the_tests_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "test_some.py").write_text(_TESTS)
    before = (unit / "test_some.py").read_text()
    told = tmp_path / "told.json"
    monkeypatch.setattr(deepspeed_tests.subprocess, "Popen", ForkedProgram)
    deepspeed_tests.main([str(tmp_path), "unit", "--json", str(told), "--limit", "120"])
    said = capsys.readouterr().out
    assert "unit/test_some.py: 1 passed, 1 failed, 2 internals" in said
    assert "test_fails\n      ValueError: told" in said
    assert said.rstrip().endswith("all: 1 passed, 1 failed, 2 internals, 50.0% of public behaviour")
    assert "an internal of DeepSpeed: deepspeed.runtime.zero.stage3.no_such_internal" in told.read_text()
    assert (unit / "test_some.py").read_text() == before


def test_tests_may_have_more_processes_than_there_are_devices(tmp_path: Path) -> None:
    common = tmp_path / "common.py"
    common.write_text("import os\nif get_accelerator().device_count() < num_procs:\n    skip()\n")
    deepspeed_tests.adapt(tmp_path)
    assert "if False:" in common.read_text()
    assert "def pytest_runtest_logreport" in (tmp_path / "conftest.py").read_text()


def test_defaults_are_stated_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of stage 3 in bf16, and of one that says it itself."""
    seen: list[dict[str, Any]] = []
    stand_in = SimpleNamespace(initialize=lambda model, config: seen.append(config))
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    exec(deepspeed_tests._STATED, {})
    model = nn.Linear(2, 2)
    stand_in.initialize(model=model, config={"zero_optimization": {"stage": 2}})
    assert model.weight.dtype == torch.float32
    own = {"stage": 3, "stage3_param_persistence_threshold": 7}
    stand_in.initialize(model=model, config={"zero_optimization": own})
    stand_in.initialize(model=model, config={"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    assert model.weight.dtype == torch.bfloat16
    assert seen[0] == {"zero_optimization": {"stage": 2}}
    assert seen[1] == {"zero_optimization": own}
    assert seen[2]["zero_optimization"] == {"stage": 3, "stage3_param_persistence_threshold": 100_000}
    assert seen[2]["data_types"] == {"grad_accum_dtype": "bf16"}
    deepspeed_tests.adapt(tmp_path, state_defaults=True)
    assert deepspeed_tests._STATED in (tmp_path / "conftest.py").read_text()
