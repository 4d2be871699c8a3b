"""``TorchCheckpointEngine``: files of torch.save that are read without running code; answers of DeepSpeed 0.19.8."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, TorchCheckpointEngine
from ds_hf.errors import CheckpointError


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    engine, info = TorchCheckpointEngine(None), CheckpointCommitInfo("step10", str(tmp_path), save_latest=True)
    path = str(tmp_path / "step10" / "state.pt")
    engine.create(info)
    engine.makedirs(str(tmp_path / "step10"), exist_ok=True)
    shared = torch.arange(6.0)
    engine.save({"first": [9]}, path)
    engine.save({"a": shared, "view": shared[2:], "step": 10}, path)
    found = engine.load(path, map_location="cpu")
    assert torch.equal(found["a"], shared)
    assert found["step"] == 10
    assert found["view"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()
    assert engine.commit(info) is True
    assert [each.name for each in (tmp_path / "step10").iterdir()] == ["state.pt"]
    assert (engine.name, engine.is_decoupled(), engine.preserves_storage_sharing()) == (
        "TorchCheckpointEngine",
        False,
        True,
    )
    assert [engine.is_data_parallel_writer(rank) for rank in (0, 1)] == [True, False]
    assert engine.get_commit_info() is None


def test_files_that_would_run_code_or_are_damaged(tmp_path: Path) -> None:
    engine, path = TorchCheckpointEngine(), tmp_path / "state.pt"
    with pytest.raises(CheckpointError, match=r"state_dict\['args'\] is a argparse.Namespace"):
        engine.save({"args": argparse.Namespace(x=1)}, str(path))
    assert not list(tmp_path.iterdir())
    torch.save({"args": argparse.Namespace(x=1)}, path)
    with pytest.raises(CheckpointError, match=r"state.pt: cannot be read without running code.*weights_only=False"):
        engine.load(str(path))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"state.pt: "):
        engine.load(str(path))
    with pytest.raises(FileNotFoundError):
        engine.load(str(tmp_path / "none.pt"))


def test_an_engine_of_ones_own() -> None:
    class Memory(CheckpointEngine):
        def __init__(self) -> None:
            super().__init__()
            self.files: dict[str, Any] = {}

        def create(self, info: CheckpointCommitInfo) -> None:
            self.files.clear()

        def save(self, state_dict: dict[str, Any], path: str) -> None:
            self.files[path] = state_dict

        def load(self, path: str, map_location: Any = None) -> Any:
            return self.files[path]

        def commit(self, info: CheckpointCommitInfo) -> bool:
            return bool(self.files)

    engine = Memory()
    engine.save({"a": 1}, "x")
    assert (engine.name, engine.load("x"), engine.is_decoupled()) == ("Memory", {"a": 1}, False)
    with pytest.raises(TypeError, match="abstract"):
        CheckpointEngine()  # type: ignore[abstract]


def test_damaged_values_are_found(tmp_path: Path) -> None:
    engine, path = TorchCheckpointEngine(), tmp_path / "state.pt"
    engine.save({"a": torch.arange(64.0)}, str(path))
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(64.0).numpy().tobytes()) + 100] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state.pt: damaged.*record"):
        engine.load(str(path))
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)  # as before torch 1.6, without checksums
    assert engine.load(str(path)) == {"a": 1}
