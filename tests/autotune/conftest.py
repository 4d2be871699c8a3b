"""A script and a file to tune, and a search in the made-up world."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_hf.autotune.options import Options
from ds_hf.autotune.result import Result
from ds_hf.autotune.run import tune
from tests.autotune.world import World

FREE = ("zero_optimization.stage", "ds_hf.compile", "gradient_checkpointing")
KEPT = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


@pytest.fixture(autouse=True, scope="session")
def _searches_of_tests_are_not_remembered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where a fixture of a module makes one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of earlier searches, those of other tests among them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A Trainer's command line with a stage 3 file whose batch keys the Trainer fills."""
    script, config = tmp_path / "train.py", tmp_path / "ds_config.json"
    script.write_text("raise SystemExit('never started')\n")
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config.write_text(json.dumps({**dict.fromkeys(keys, "auto"), "zero_optimization": {"stage": 3}}))
    return [str(script), "--per_device_train_batch_size", "2", "--deepspeed", str(config), "--lr", "1"]


@pytest.fixture
def search(words: list[str], tmp_path: Path) -> Callable[..., Result]:
    """Tune the command in a world."""

    def run(world: World, **changes: Any) -> Result:
        options = {"results_dir": tmp_path / "results", "tune": FREE, "fix": KEPT, "budget": 1e9, "processes": 4}
        return tune(words, Options(**{**options, **changes}), run=world.run)

    return run
