"""Functions in the place of scripts: what is sent, what is refused with a sentence, the docs' example end to end."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.autotune import tune
from ds_hf.autotune.function import main, words_of
from ds_hf.autotune.study import TuneError
from ds_hf.errors import ConfigError
from tests.autotune.test_real import ENV, left_behind

DOCS = Path(__file__).parents[2] / "docs" / "autotuning.md"
CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}


def test_it_is_called_with_what_it_refers_to(tmp_path: Path) -> None:
    """A closure of a test's own function, which no process can import."""
    found = tmp_path / "found.json"

    def train(config: str, **arguments: Any) -> None:
        found.write_text(json.dumps([Path(config).name, arguments]))

    words = words_of(train, CONFIG, tmp_path / "results")
    assert words[:2] == ["-m", "ds_hf.autotune.function"]
    assert words[3] == "--deepspeed"  # it takes the Trainer's options
    assert json.loads(Path(words[4]).read_text()) == CONFIG
    main([*words[2:], "--per_device_train_batch_size", "4", "--gradient_checkpointing", "True", "--name", "a b"])
    name, arguments = json.loads(found.read_text())
    assert name == "ds_config.json"
    assert arguments == {"per_device_train_batch_size": 4, "gradient_checkpointing": True, "name": "a b"}


def test_a_function_without_further_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(config: str) -> None:
        raise LookupError(config)

    words = words_of(train, "zero2", tmp_path / "results")
    assert words[3:] == ["--deepspeed_config", "zero2"]
    path, parcel = pickle.loads(Path(words[2]).read_bytes())
    assert path == list(dict.fromkeys(sys.path))
    with pytest.raises(LookupError, match="zero2"):
        pickle.loads(parcel)("zero2")
    with pytest.raises(LookupError):
        main(words[2:])
    assert words_of(train, "zero2", tmp_path / "results") == words  # so that a search goes on
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, sys.path[0]])  # as a cell does that is run again
        assert words_of(train, "zero2", tmp_path / "results") == words


def _two(config: str, other: int) -> None:
    pass


def _generator(config: str) -> Any:
    yield config


lock = threading.Lock()


def _locked(config: str) -> None:
    print(lock)


@pytest.mark.parametrize(
    ("function", "config", "said"),
    [
        (lambda config: None, CONFIG, "not a lambda: define it with def"),
        (len, CONFIG, "not a builtin_function_or_method"),
        (torch.nn.Linear, CONFIG, "not a type"),
        (_two, CONFIG, "missing a required argument: 'other'"),
        (_generator, CONFIG, "yields or awaits"),
        (_two, None, "needs a configuration"),
    ],
)
def test_what_is_no_function_to_launch(function: Any, config: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        tune(function, config, results_dir=tmp_path / "results")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_sent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_locked, "__module__", "__main__")  # of a notebook: by value
    with pytest.raises(ConfigError, match=r"_locked cannot be sent .* because of lock \(TypeError: cannot pickle"):
        words_of(_locked, CONFIG, tmp_path)


def test_what_lies_on_a_gpu_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)

    def train(config: str) -> None:
        model(torch.ones(2))

    words_of(train, CONFIG, tmp_path)
    monkeypatch.setattr("torch.Tensor.device", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="train uses model, which is on cuda:0 in this process: make it inside"):
        words_of(train, CONFIG, tmp_path)


def test_gpu_memory_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("is_initialized", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 3 << 30)
    with pytest.raises(ConfigError, match=r"holds 3.00 GiB of GPU memory, which the launches of _generator would lack"):
        words_of(_named(), CONFIG, tmp_path)


def _named() -> Callable[[str], None]:
    def _generator(config: str) -> None:
        pass

    return _generator


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "2"), ("DS_HF_TRIAL", "x")])
def test_inside_other_launches(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"without torchrun|in a launch of a search"):
        words_of(_named(), CONFIG, tmp_path)


def test_a_command_line_has_its_configuration() -> None:
    with pytest.raises(ConfigError, match="names its configuration itself"):
        tune(["train.py"], "ds_config.json")


def _without_an_engine(config: str) -> None:
    pass


def _ends_early(config: str) -> None:
    import ds_hf

    ds_hf.initialize(model=torch.nn.Linear(2, 2), config=config)


def _raises(config: str) -> None:
    raise ValueError("no such data set: wiki")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_without_an_engine, "the function ended without an error, but never made an engine"),
        (_ends_early, "the function made an engine, but ended before it had trained enough steps"),
        (_raises, "your function, with your own file, failed: exit code 1: ValueError: no such data set: wiki"),
    ],
)
def test_functions_that_fail_by_themselves(function: Callable[[str], None], said: str, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=re.escape(said)) as caught:
        tune(function, CONFIG, results_dir=tmp_path / "results", processes=1)
    assert str(caught.value).endswith("output.log")
    assert not left_behind(tmp_path)


def _example() -> str:
    every = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    (found,) = [each for each in every if "def train(config):" in each]
    return str(found).replace("budget=120.0", "budget=60.0, trials=1, confirm=False")


@pytest.mark.slow
def test_the_docs_example_in_cells(tmp_path: Path) -> None:
    """As a notebook runs it: each cell in ``__main__``, from no file."""
    cells = f"for cell in {_example().split(chr(10) * 3)!r}:\n    exec(compile(cell, '<cell>', 'exec'), globals())\n"
    found = subprocess.run(
        [sys.executable, "-"], input=cells, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **ENV},
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    *_, files = found.stdout.splitlines()
    config, report, rows = files.split()
    assert json.loads((tmp_path / config).read_text())["train_batch_size"] == 64
    assert (tmp_path / report).stat().st_size > 10_000
    assert int(rows) >= 3
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_nothing_is_left_of_a_kernel_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import time\nfrom ds_hf.autotune import tune\n\ndef train(config):\n    time.sleep(600)\n\n"
        f"if __name__ == '__main__':\n    tune(train, {CONFIG!r}, processes=2)\n"
    )
    process = subprocess.Popen([sys.executable, "hangs.py"], cwd=tmp_path, env={**os.environ, **ENV})
    end = time.monotonic() + 100
    while len(left_behind(tmp_path)) < 3 and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while left_behind(tmp_path) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left_behind(tmp_path)
