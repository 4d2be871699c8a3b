"""Folders that are not what they should be: missing, unreadable, files instead of folders, changed by another run."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_hf.checkpoint.places import find_folder
from ds_hf.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from ds_hf.engine.checkpoint import load as loading
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import build, config, differences, engine_of, states, train
from tests.helpers.interpreter import python


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    with engine_of(config(2)) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder, tag="tag")
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    built = build(config(3), seed=1)
    yield built
    built.destroy()


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def refused(engine: Any, folder: Path, match: str, tag: str | None = None) -> None:
    before = states(engine)
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(folder, tag)
    assert differences(before, states(engine)) == []
    with pytest.raises(CheckpointError, match=match):
        get_fp32_state_dict_from_zero_checkpoint(folder, tag)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "latest does not name a checkpoint: it is empty"),
        (b"\n", "latest does not name a checkpoint: it is empty"),
        (b".", "latest names '.': it is the folder itself"),
        (b"..", r"latest names '\.\.': it leads out of the folder"),
        (b"tag/../../x", "latest names .*: it leads out of the folder"),
        (b"/etc", "latest names '/etc': it leads out of the folder"),
        (b"a\0b", r"latest names 'a\\x00b': it has a tab"),
        (b"\x1b[2J", r"latest names '\\x1b\[2J': it has a tab, line break, direction mark"),
        ("\u202egat".encode(), r"latest names '\\u202egat': it has a tab"),
        (b"secret\nlines", "latest does not name a checkpoint: it has a tab, line break"),
        (b"\xff\xfe", "latest cannot be read"),
        (b"x" * 5000, "latest cannot be read: it has 5000 bytes where at most 4096"),
        (b"x" * 1000, "latest does not name a checkpoint: it is too long"),
        (b"x/" * 1000, "latest does not name a checkpoint: it is too long"),
    ],
)
def test_latest_that_is_no_name(engine: Any, folder: Path, content: bytes, match: str) -> None:
    (folder / "latest").write_bytes(content)
    refused(engine, folder, match)


def test_latest_of_a_terabyte(engine: Any, folder: Path) -> None:
    with (folder / "latest").open("w") as file:
        file.truncate(10**12)
    refused(engine, folder, "latest cannot be read: it has 1000000000000 bytes")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself"])
def test_latest_that_is_no_file(engine: Any, folder: Path, kind: str) -> None:
    path = folder / "latest"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("latest")
    refused(engine, folder, "latest cannot be read|neither manifest.json nor a file 'latest'")


@pytest.mark.parametrize("kind", ["link", "second name"])
@pytest.mark.parametrize("content", ["my-secret", "my-secret\nand more", "my-secret" * 200, "my-secret\t"])
def test_latest_that_is_another_file_is_not_told(engine: Any, folder: Path, kind: str, content: str) -> None:
    """A stranger's folder may have a link to any file of the user's."""
    secret = folder.parent / "secret"
    secret.write_text(content)
    path = folder / "latest"
    path.unlink()
    if kind == "link":
        path.symlink_to(secret)
    else:
        path.hardlink_to(secret)
    with pytest.raises(CheckpointError, match="latest does not name a checkpoint: ") as caught:
        engine.load_checkpoint(folder)
    assert "my-secret" not in str(caught.value)
    secret.write_text("tag")  # as in a cache, where every file is a link
    assert engine.load_checkpoint(folder)[0] == str(folder / "tag")


@pytest.mark.parametrize("given", ["", None, 5, b"x"])
def test_what_is_not_the_path_of_a_folder(engine: Any, given: Any, tmp_path: Path) -> None:
    message = "is empty" if given == "" else "should be the path of a folder, not of type"
    calls = [
        lambda: engine.save_checkpoint(given),
        lambda: engine.load_checkpoint(given),
        lambda: engine.load_checkpoint(given, tag="tag"),
        lambda: engine.save_16bit_model(given),
        lambda: engine.save_16bit_model(tmp_path, given),
        lambda: engine.export_pretrained(given),
        lambda: get_fp32_state_dict_from_zero_checkpoint(given),
        lambda: convert_zero_checkpoint_to_state_dict(tmp_path, given),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert isinstance(caught.value, CheckpointError)
    assert list(tmp_path.iterdir()) == []


def test_file_instead_of_the_folder(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    path.write_text("x")
    refused(engine, path, "checkpoints is a file and not the folder of checkpoints")


def test_file_instead_of_the_tag(engine: Any, folder: Path) -> None:
    (folder / "other").write_text("x")
    refused(engine, folder, "other is a file and not the folder of a checkpoint", "other")


def test_tag_that_leads_elsewhere(engine: Any, folder: Path) -> None:
    refused(engine, folder / "tag", r"'\.\./tag' cannot be the tag of a checkpoint: it leads out", "../tag")


PROBE = """
import os, sys
from pathlib import Path
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.engine.checkpoint.workload import build, config
from ds_hf.errors import CheckpointError
engine = build(config(2))
os.setgid(65534), os.setuid(65534)
for folder in map(Path, sys.argv[1:]):
    for action in (engine.load_checkpoint, get_fp32_state_dict_from_zero_checkpoint):
        try:
            action(folder)
            print("loaded", folder)
        except CheckpointError as error:
            print(error)
"""


def test_what_may_not_be_read(original: Path) -> None:
    """The root user may read everything, so this is another user's process."""
    if os.geteuid() != 0:
        pytest.skip("only the root user can become another one")
    root = Path(tempfile.mkdtemp(prefix="ds_hf_test_", dir="/tmp"))  # tmp_path is the root user's alone
    names = ["", "latest", "tag", "tag/manifest.json", "tag/rank_00000.safetensors"]
    try:
        root.chmod(0o755)
        for number, name in enumerate(names):
            home = Path(shutil.copytree(original, root / str(number)))
            for path in (home, *home.rglob("*")):
                path.chmod(0o755)
            (home / name).chmod(0)
        done = python("-c", PROBE, *(str(root / str(number)) for number in range(len(names))))
        assert done.returncode == 0, done.stderr
        for number in range(len(names)):
            lines = [line for line in done.stdout.splitlines() if str(root / str(number)) in line]
            assert len(lines) == 2, (names[number], done.stdout)
            assert all("Permission denied" in line for line in lines), (names[number], lines)
    finally:
        shutil.rmtree(root)


def test_a_checkpoint_that_another_run_replaces(engine: Any, folder: Path, original: Path) -> None:
    """It is read half from the one and half from the other: an error, and the next load is fine."""
    read = loading._read_weights

    def replacing(*arguments: Any) -> None:
        os.rename(folder / "tag", folder / "former")
        shutil.copytree(original / "tag", folder / "tag")
        read(*arguments)

    with mock.patch.object(loading, "_read_weights", replacing), pytest.raises(CheckpointError, match="was replaced"):
        engine.load_checkpoint(folder)
    assert engine.load_checkpoint(folder)[0] is not None


def test_a_checkpoint_that_another_run_removes(engine: Any, folder: Path) -> None:
    read = loading._read_weights

    def removing(*arguments: Any) -> None:
        shutil.rmtree(folder / "tag")
        read(*arguments)

    with mock.patch.object(loading, "_read_weights", removing), pytest.raises(CheckpointError, match=str(folder)):
        engine.load_checkpoint(folder)


def test_a_folder_that_another_run_writes_into_at_the_same_time(folder: Path) -> None:
    """The same tag is saved again and again while it is loaded: every load is whole, or says why not."""
    with engine_of(config(2), seed=1) as writer:
        train(writer, 1)
        writer.save_checkpoint(folder, tag="tag")
        stop = threading.Event()
        found: list[Any] = []

        def reads() -> None:
            while not stop.is_set():
                try:
                    found.append(get_fp32_state_dict_from_zero_checkpoint(folder)["scale"].item())
                except CheckpointError as error:
                    found.append(str(error))

        thread = threading.Thread(target=reads)
        thread.start()
        saved = {float(writer.module.scale.detach())}
        for number in range(12):
            train(writer, 1, number)
            writer.save_checkpoint(folder, tag="tag")
            saved.add(float(writer.module.scale.detach()))
        stop.set()
        thread.join()
    values = [value for value in found if isinstance(value, float)]
    assert len(values) > 5
    assert set(values) <= saved
    assert all(str(folder) in text for text in found if isinstance(text, str))


def test_find_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_folder(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_folder(tmp_path / "nowhere")
