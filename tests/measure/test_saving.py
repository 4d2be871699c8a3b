"""A measured script is told apart at whatever would save: functions of libraries, and files from before it began."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hf.measure.protocol import TRIAL_ENV
from ds_hf.measure.saving import LR_ENV, WRITERS, SaveGuard, being_measured
from tests.helpers.distributed import run_distributed


def _everything_that_saves(folder: Path) -> tuple[list[str], list[str]]:
    """In a process of its own, as the wrapped functions stay wrapped."""
    import safetensors.torch
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1, num_key_value_heads=1))  # fmt: skip
    said: list[str] = []
    SaveGuard(said.append)
    model.save_pretrained(folder / "a")
    model.config.save_pretrained(folder / "b")
    model.generation_config.save_pretrained(folder / "c")
    model.push_to_hub("somebody/something")
    torch.save(model.state_dict(), folder / "d.pt")
    with (folder / "file").open("wb") as file:
        torch.save(model.state_dict(), file)
    safetensors.torch.save_file({"x": torch.zeros(2)}, folder / "e.safetensors")
    dcp.save({"x": torch.zeros(2)}, checkpoint_id=folder / "f")
    memory = io.BytesIO()
    torch.save({"x": 1}, memory)  # no file
    assert torch.load(io.BytesIO(memory.getvalue())) == {"x": 1}
    assert (folder / "file").stat().st_size == 0
    return said, sorted(path.name for path in folder.iterdir())


def test_functions_that_save(tmp_path: Path) -> None:
    said, left = run_distributed(_everything_that_saves, 1, tmp_path, backend=None)[0]
    assert said == [
        "PreTrainedModel.save_pretrained()",
        "PreTrainedConfig.save_pretrained()",
        "GenerationConfig.save_pretrained()",
        "PushToHubMixin.push_to_hub()",
        "save()",
        "save()",
        "save_file()",
        "save()",
    ]
    assert left == ["file"]


class _Stopped(Exception):
    pass


def _changes_to_files(folder: Path) -> list[str]:
    said: list[str] = []

    def stop(what: str) -> None:
        said.append(Path(what).name)
        raise _Stopped

    guard = SaveGuard(stop)
    guard.watch_files()
    new, old, tree = folder / "new", folder / "old", folder / "tree"
    steps: list[Callable[[], Any]] = [
        lambda: old.write_text("other"),
        lambda: os.remove(old),
        lambda: os.replace(new, old),
        lambda: os.rename(old, folder / "elsewhere"),
        lambda: os.truncate(old, 0),
        lambda: shutil.rmtree(tree),
        lambda: new.write_text("mine"),  # from here on nothing that is refused
        lambda: new.write_text("mine again"),
        lambda: old.open("a").close(),
        lambda: old.read_text(),
        lambda: (folder / "empty").write_text("a lock"),
        lambda: (folder / ".cache" / "entry").write_text("again"),
        lambda: os.remove(new),
        lambda: tempfile.NamedTemporaryFile("w", dir=folder).close(),
        lambda: open(
            folder, "w", opener=lambda _, flags: os.open(folder / "another", flags)
        ).close(),  # so does Python 3.12
    ]
    for step in steps:
        with contextlib.suppress(_Stopped):
            step()
    return said


def test_files_from_before_are_not_touched(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("precious")
    for name in ("tree", ".cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry").write_text("precious")
    (tmp_path / "empty").write_text("")
    for path in (old, tmp_path / "tree" / "entry", tmp_path / "empty", tmp_path / ".cache" / "entry"):
        os.utime(path, (1e9, 1e9))
    assert run_distributed(_changes_to_files, 1, tmp_path, backend=None)[0] == [
        "old", "old", "old", "old", "old", "tree",
    ]  # fmt: skip
    assert old.read_text() == "precious"
    assert (tmp_path / "tree" / "entry").read_text() == "precious"
    assert (tmp_path / ".cache" / "entry").read_text() == "again"


def _names_that_are_not_there() -> list[str]:
    import importlib

    missing = []
    for module, names in WRITERS.items():
        found = importlib.import_module(module)
        for name in names:
            target: Any = found
            for part in name.split("."):
                target = getattr(target, part, None)
            missing += [] if callable(target) else [f"{module}: {name}"]
    return missing


def test_every_name_exists() -> None:
    """Also after an update of the libraries: a name that is gone would be written past in silence."""
    assert run_distributed(_names_that_are_not_there, 1, backend=None)[0] == []


def test_who_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LR_ENV, TRIAL_ENV):
        monkeypatch.delenv(name, raising=False)
    assert not being_measured()
    monkeypatch.setenv(TRIAL_ENV, "request.json")
    assert being_measured()
