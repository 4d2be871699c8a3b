"""Whole weights where older ones may lie: written aside, and given their names so that readers never find a mixture."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ds_hf.checkpoint.holds import FolderHold, boot_of, make_folder, sync, this_writer, untouched
from ds_hf.errors import CheckpointError
from ds_hf.regular_files import read_regular

__all__ = [
    "CONFIG",
    "POINTER",
    "Beside",
    "in_shards",
    "is_folder",
    "pointed_at",
    "publish_weights",
    "weights_aside",
    "weights_in",
]

CONFIG, POINTER = "config.json", "transformers_weights"  # the key that names a file of weights for transformers
_CONFIG_NBYTES = 2**24
_ENTRIES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # of whole weights, in the order in which transformers looks for them: it reads the first that is there  # fmt: skip
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_ASIDE = ".weights.saving-"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

T = TypeVar("T")


@contextmanager
def weights_aside(folder: Path) -> Iterator[Path]:
    """A hidden folder inside ``folder`` for weights that ``publish_weights`` gives their names.

    What killed writers have left there is removed, unless readers depend on it.
    """
    make_folder(folder)
    _remove_aside(folder, _read_by_index(folder))
    aside = folder / f"{_ASIDE}{this_writer()}"
    hold = FolderHold(aside, made=True)
    try:
        yield aside
    finally:
        hold.close()
        if _read_by_index(folder) != aside.name:  # else it failed between two names: readers find the new ones there
            shutil.rmtree(aside, ignore_errors=True)


def _remove_aside(folder: Path, but: str = "") -> None:
    FolderHold.remove_unnamed(folder)
    for path in folder.glob(f"{_ASIDE}*"):
        if path.name == but or not path.is_dir() or path.is_symlink():
            continue
        lives = FolderHold.lives(path)
        here = path.name.rpartition("-")[2].startswith(boot_of()[:8])
        if lives is not True and ((here and lives is False) or untouched(path)):
            shutil.rmtree(path, ignore_errors=True)


def _read_by_index(folder: Path) -> str:
    """The hidden folder that readers are led to, of a writer that was killed while it gave weights their names."""
    named = str(pointed_at(folder) or "")
    if named.startswith(_ASIDE):
        return named.partition("/")[0]
    for name in _ENTRIES:
        with contextlib.suppress(OSError, ValueError, CheckpointError, AttributeError, TypeError, RecursionError):
            if name.endswith(".json"):
                known = json.loads(read_regular(folder / name, 2**28))["weight_map"].values()
                for file in known:
                    if file.startswith(_ASIDE):
                        return str(file.partition("/")[0])
    return ""


def pointed_at(folder: Path) -> Any:
    """What ``config.json`` says to read instead of the usual names of weights; ``None`` where it says nothing."""
    with contextlib.suppress(OSError, ValueError, CheckpointError, AttributeError, RecursionError):
        return json.loads(read_regular(folder / CONFIG, _CONFIG_NBYTES)).get(POINTER)
    return None


def _unpoint(aside: Path, folder: Path, entry: str) -> None:
    """Let ``config.json`` no longer lead readers past ``entry``, which is newer."""
    pointed = pointed_at(folder)
    if pointed is None or pointed == entry:
        return
    if not str(pointed).startswith(_ASIDE):
        warnings.warn(f"{folder / CONFIG} had {POINTER}, which led past {entry}: it was taken out", stacklevel=3)
    content = json.loads(read_regular(folder / CONFIG, _CONFIG_NBYTES))
    del content[POINTER]
    staged = aside / "config"
    staged.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(staged)
    os.replace(staged, folder / CONFIG)


class Beside(Protocol):
    """Files that belong to weights, such as their configuration, and get their names together with them."""

    def begin(self, entry: str) -> None:
        """The new weights are whole at ``entry``, relative to the folder; they get their names next."""

    def end(self) -> None:
        """The new weights have their names."""


def publish_weights(
    aside: Path,
    folder: Path,
    names: Sequence[str],
    index: Mapping[str, Any] | None = None,
    *,
    sole: bool = True,
    beside: Beside | None = None,
) -> None:
    """Give the files ``names`` of ``aside`` their names in ``folder``, and take older weights there away.

    Whenever the process is killed, readers find the former weights or these: names that an older index uses are only
    replaced while an index names the new files where they lie aside, and what readers look for first goes last.

    Args:
        index: content of the index of several files, whose name is made from theirs.
        sole: remove all older weights; else only those that readers would take instead of these, with a warning.
        beside: what is switched with them.
    """
    entry = names[0] if index is None else re.sub(r"-\d{5}-of-\d{5}", "", names[0]) + ".index.json"
    for name in (*names, entry):
        if is_folder(folder / name):
            raise CheckpointError(f"{folder / name} is a folder: move it away, or write somewhere else")
    for name in names:
        sync(aside / name)
    staged: dict[str, Any] = {}
    if index is not None:
        files = {tensor: f"{aside.name}/{name}" for tensor, name in index["weight_map"].items()}
        staged = {**index, "weight_map": files}
    if beside is not None:
        if staged:
            _put_index(aside, aside / entry, staged)
        beside.begin(f"{aside.name}/{entry}")
    if index is not None:
        if any(os.path.lexists(folder / name) for name in names):
            _put_index(aside, folder / entry, staged)
        for name in names:
            _name(aside, folder / name)
        _put_index(aside, folder / entry, index)
    elif beside is not None:
        _name(aside, folder / entry)
    else:
        os.replace(aside / entry, folder / entry)
    sync(folder)
    _retire(folder, entry, [*names, entry], sole=sole)
    if beside is not None:
        beside.end()
    if entry in _ENTRIES:
        _unpoint(aside, folder, entry)
    _remove_aside(folder, aside.name)
    sync(folder)


def weights_in(folder: Path) -> Path | None:
    """Whole weights that ``publish_weights`` would take away, as readers find them."""
    return next((folder / name for name in _ENTRIES if _is_file(folder / name)), None)


def _retire(folder: Path, entry: str, kept: Sequence[str], *, sole: bool) -> None:
    """Remove older weights: what readers would take first last, then the files that nothing names any more."""
    first = _ENTRIES[: _ENTRIES.index(entry)] if entry in _ENTRIES else ()
    gone = [name for name in (_ENTRIES if sole else first) if name not in kept and _is_file(folder / name)]
    families = {name.partition(".")[0].partition("-")[0] for name in gone if not sole}
    for name in reversed(gone):
        if not sole:
            told = f"{folder / name} is older, and would be read instead of {entry}: it was removed"
            warnings.warn(told, stacklevel=3)
        (folder / name).unlink(missing_ok=True)
    for path in sorted(folder.iterdir()):
        part = _WEIGHTS.fullmatch(path.name) is not None and path.name not in (*_ENTRIES, *kept) and _is_file(path)
        if part and (sole or path.name.partition("-")[0] in families):
            path.unlink(missing_ok=True)


def is_folder(path: Path) -> bool:
    """Whether a folder itself, no link to one, has the name."""
    return path.is_dir() and not path.is_symlink()


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and not is_folder(path)


def _put_index(aside: Path, path: Path, content: Mapping[str, Any]) -> None:
    staged = aside / "index"
    staged.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(staged)
    os.replace(staged, path)


def _name(aside: Path, path: Path) -> None:
    """Name a file that lies aside, and leave it there too where the file system lets a file have two names."""
    second = aside / "named"
    try:
        os.link(aside / path.name, second)
    except OSError:
        second = aside / path.name
    os.replace(second, path)


def in_shards(sizes: Iterable[tuple[T, int]], most: str | int | None) -> list[list[T]]:
    """Runs of items, each given with its bytes, that together have at most ``most``; one that has more is alone.

    Args:
        most: a number, text such as ``"5GB"``, ``None`` for no limit.

    Raises:
        ValueError: ``most`` is no size.
    """
    limit = math.inf if most is None else _bytes_of(most)
    shards: list[list[T]] = [[]]
    held = 0
    for item, nbytes in sizes:
        if shards[-1] and held + nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += nbytes
    return shards


def _bytes_of(size: str | int) -> float:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", size, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{size!r} is not a size such as 5GB, 500MB or 2GiB")
    return float(match[1]) * _UNITS[match[2].upper()]
