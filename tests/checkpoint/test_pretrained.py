"""Sharded safetensors: files that different saves wrote are no model."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_hf.checkpoint.pretrained import ShardedWriter, Spec, read_pretrained, weights_in
from ds_hf.errors import CheckpointError

NAMES = ("first", "second")
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def save(folder: Path, value: float) -> Path:
    """Two files of one tensor each."""
    with ShardedWriter(folder, [Spec(name, (4,), torch.float32) for name in NAMES], 16) as writer:
        for name in NAMES:
            writer.put(name, torch.full((4,), value))
    return folder


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    one, other = save(tmp_path / "one", 1), save(tmp_path / "other", 2)
    assert read_pretrained(one).manifest.parameters.keys() == set(NAMES)
    assert dict(weights_in(one)) == {name: one / file for name, file in zip(NAMES, SHARDS, strict=True)}
    shutil.copy(other / SHARDS[1], one / SHARDS[1])
    for read in (read_pretrained, lambda folder: list(weights_in(folder))):
        with pytest.raises(CheckpointError, match=f"{SHARDS[0]} and {SHARDS[1]} were written by different saves"):
            read(one)
    shutil.copy(other / SHARDS[0], one / SHARDS[0])
    assert read_pretrained(one).manifest.parameters.keys() == set(NAMES), "all of the other one"


def test_a_file_that_was_edited_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path / "one", 1)
    save_file(load_file(folder / SHARDS[1]), folder / SHARDS[1])
    with caplog.at_level(logging.WARNING, "ds_hf"):
        read_pretrained(folder)
    assert f"{SHARDS[1]} has no mark of the save that wrote {SHARDS[0]}" in caplog.text
