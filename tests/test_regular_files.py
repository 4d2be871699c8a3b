"""Files whose paths users give: whatever is not a regular file is refused at once, by every reader."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.inspect import faults_of
from ds_hf.config.load import load_config
from ds_hf.errors import CheckpointError, ConfigError
from ds_hf.launcher.environment import read_environment_files
from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.hostfile import read_hostfile
from ds_hf.regular_files import check_regular, open_regular, read_regular

pytestmark = pytest.mark.timeout(60)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # names of sockets are short
        os.close(here)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (_pipe, "not a regular file but a pipe"),
    "endless": (_endless, "not a regular file but a device"),
    "socket": (_socket, "not a regular file but a socket"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_regular(tmp_path: Path, what: str) -> None:
    make, message = ODD[what]
    make(tmp_path / "x")
    for read in (open_regular, check_regular, read_regular):
        with pytest.raises(OSError, match=message):
            read(tmp_path / "x")


def test_what_is_regular(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    assert [read_regular(tmp_path / name) for name in ("x", "link")] == [b"content"] * 2
    assert check_regular(tmp_path / "x") == 7
    assert read_regular("/proc/self/status").startswith(b"Name:")  # says that it has 0 bytes
    with pytest.raises(OSError, match="it has 7 bytes where at most 6 are expected"):
        read_regular(tmp_path / "x", 6)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "y")


def _config(path: Path) -> Any:
    return load_config(path)


def _hostfile(path: Path) -> Any:
    return read_hostfile(str(path), explicit=True)


def _default_hostfile(path: Path) -> Any:
    return read_hostfile(str(path), explicit=False)


def _environment(path: Path) -> Any:
    return read_environment_files([path.parent], path.name)


READERS = {
    "configuration": (_config, "ds.json", ConfigError),
    "hostfile": (_hostfile, "hosts", LaunchError),
    "default hostfile": (_default_hostfile, "hosts", LaunchError),
    "environment": (_environment, ".deepspeed_env", LaunchError),
    "one file of weights": (open_source, "model.safetensors", CheckpointError),
    "weights of a model": (lambda path: open_source(path.parent), "model.safetensors", CheckpointError),
    "index": (lambda path: open_source(path.parent), "model.safetensors.index.json", CheckpointError),
    "shard": (lambda path: open_source(path.parent), "model-00001-of-00001.safetensors", CheckpointError),
    "DeepSpeed's shard": (lambda path: open_source(path.parent), "mp_rank_00_model_states.pt", CheckpointError),
}


@pytest.mark.parametrize("what", ["pipe", "endless"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_it(tmp_path: Path, reader: str, what: str) -> None:
    read, name, error = READERS[reader]
    make, message = ODD[what]
    make(tmp_path / name)
    if reader == "shard":
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(error, match=message) as raised:
        read(tmp_path / name)
    assert name in str(raised.value)


@pytest.mark.parametrize("what", ["pipe", "endless"])
def test_shards_of_torch(tmp_path: Path, what: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    (shard,) = (tmp_path / "x").glob("*.distcp")
    nbytes = shard.stat().st_size
    shard.unlink()
    ODD[what][0](shard)
    (tmp_path / "x" / "padding").write_bytes(bytes(nbytes))
    (fault,) = faults_of(tmp_path / "x")
    assert shard.name in fault
    assert ODD[what][1] in fault
