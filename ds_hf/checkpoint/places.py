"""Where a checkpoint lies: the folder that is given, a tag inside it, or what ``latest`` names."""

from __future__ import annotations

import glob
import os
import stat
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.format import LATEST, MANIFEST
from ds_hf.errors import CheckpointError, CheckpointPlaceError
from ds_hf.regular_files import read_regular

__all__ = ["find_folder", "folder_of", "recover", "tag_fault"]

_LATEST_NBYTES = 4096  # a file 'latest' may have


def recover(folder: Path) -> Path:
    """``folder``, or its former content if the process died in the moment between two renames of an overwrite."""
    if folder.exists() or not folder.parent.is_dir():
        return folder
    former = [path for path in folder.parent.glob(f".{glob.escape(folder.name)}.old-*") if (path / MANIFEST).is_file()]
    return max(former, key=lambda path: path.stat().st_mtime) if former else folder


def folder_of(given: Any, what: str) -> Path:
    """``given`` as a path.

    Raises:
        CheckpointPlaceError: it is empty or of another type; ``what`` names it.
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise CheckpointPlaceError(f"{what} should be the path of a folder, not of type {type(given).__name__}")
    if not os.fspath(given):
        raise CheckpointPlaceError(f"{what} is empty: give the path of a folder ('.' is the current one)")
    if "\0" in os.fspath(given):
        raise CheckpointPlaceError(f"{what} has a NUL character, which no path can have: {os.fspath(given)!r}")
    return Path(given)


def tag_fault(tag: str) -> str:
    """Why a tag, perhaps a stranger's, names no folder inside another; empty when it does."""
    if not tag:
        return "it is empty"
    if not tag.isprintable():
        return "it has a tab, line break, direction mark or another character that cannot be printed"
    path = Path(tag)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return "it leads out of the folder" if path.parts else "it is the folder itself"
    if len(os.fsencode(tag)) > 1024 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        return "it is too long for the name of a folder"
    return ""


def find_folder(checkpoint_dir: str | Path, tag: str | None = None, latest: str = LATEST) -> Path:
    """The folder that holds the manifest: ``checkpoint_dir`` itself, its ``tag``, or what its file ``latest`` names.

    Raises:
        CheckpointError: there is none.
        CheckpointPlaceError: ``checkpoint_dir`` or ``tag`` cannot be one.
    """
    root = folder_of(checkpoint_dir, "the folder of checkpoints")
    try:
        if root.exists() and not root.is_dir():
            raise CheckpointError(f"{root} is a file and not the folder of checkpoints")
        if tag is None and (root / MANIFEST).is_file():
            return root
        fault = "" if tag is None else tag_fault(str(tag))
        if fault:
            raise CheckpointPlaceError(f"{str(tag)!r} cannot be the tag of a checkpoint: {fault}")
        folder = _latest(root / latest) if tag is None else recover(root / str(tag))
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file and not the folder of a checkpoint")
        return folder
    except FileNotFoundError as error:
        raise CheckpointError(f"{root} holds no checkpoint: neither {MANIFEST} nor a file 'latest'") from error
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{root if tag is not None else root / latest} cannot be read: {getattr(error, 'strerror', '') or error}"
        ) from error


def _latest(path: Path) -> Path:
    """The folder that ``latest`` names. A stranger's may be a link to any file, so little of what it holds is told."""
    root = path.parent
    tag = read_regular(path, _LATEST_NBYTES).decode("utf-8").strip()
    fault = tag_fault(tag)
    folder = root if fault else recover(root / tag)
    if not fault and folder.is_dir():
        return folder
    status = path.lstat()
    told = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and len(tag) <= 255 and "\n" not in tag
    if fault or not told:
        fault = fault or "there is no such folder"
        named = f"names {tag!r}" if tag and told else "does not name a checkpoint"
        raise CheckpointError(f"{path} {named}: {fault}. Give the tag of a checkpoint, or write its name there")
    return folder
