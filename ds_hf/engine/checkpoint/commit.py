"""Making a checkpoint visible, and what saves that were killed have left.

Files are written into ``.TAG.saving-HOST-PID-ID`` beside the target. The target appears by one rename; a former one of
the same tag is renamed to ``.TAG.old-HOST-PID-ID`` before and removed after, so at every moment one of the two is
whole, and ``recover`` finds it. What else lay in its folder, a user's notes or a checkpoint of a tag below, moves to
the new one. ``latest`` is written last. Only rank 0 calls what is here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ds_hf.engine.checkpoint import zero_to_fp32
from ds_hf.engine.checkpoint.files import replace_text, sync_folder, write_text
from ds_hf.engine.checkpoint.manifest import RankReport, complete
from ds_hf.engine.checkpoint.tags import is_checkpoint_file
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["announce", "check_space", "commit", "hidden_beside", "make_folder", "remove_leftovers"]

SCRIPT = "zero_to_fp32.py"
LEFT_ALONE_S = 600.0  # a folder of another machine's process is abandoned if it was not written to for so long
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)-(?:(?P<host>\w+)-(?P<pid>\d+)-)?(?P<id>\w+)")
_STAGED_TEXT = re.compile(rf"\.(latest|{re.escape(SCRIPT)})\.(?P<pid>\d+)\.new")


def hidden_beside(target: Path, kind: str, writer: str | None = None) -> Path:
    """A new name beside ``target`` that no search for checkpoints finds; ``kind`` is "saving" or "old"."""
    return target.with_name(f".{target.name}.{kind}-{writer or this_writer()}")


def this_writer() -> str:
    """Host, process and a number of its own."""
    return f"{_host()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _host() -> str:
    return re.sub(r"\W", "_", socket.gethostname()) or "unknown"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that their names survive a crash of the machine."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise ``CheckpointError`` if ``nbytes`` do not fit on the file system of ``folder``."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        usage = shutil.disk_usage(place)
    except OSError:  # a file system that does not tell
        return
    if usage.total and usage.free < nbytes:
        raise CheckpointError(
            f"{folder} has {_gb(usage.free)} free and the checkpoint needs {_gb(nbytes)}; nothing was written. Remove "
            "something there or save elsewhere (a checkpoint of the same tag is only removed once the new one is whole)"
        )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB"


def commit(staged: Path, target: Path, description: dict[str, Any], reports: Sequence[RankReport]) -> None:
    """Manifest and script, then the rename that makes the checkpoint exist."""
    for rank, report in enumerate(reports):
        for name, nbytes in report.files.items():
            path = staged / name
            if not path.is_file() or path.stat().st_size != nbytes:
                raise CheckpointError(
                    f"rank 0 does not see {path}, which rank {rank} wrote: save_dir must be on a file system that all "
                    "ranks share"
                )
    manifest = complete(description, reports)
    write_text(staged / SCRIPT, _script(), 0o755)
    write_text(staged / zero_to_fp32.MANIFEST, zero_to_fp32.sealed(manifest))
    sync_folder(staged)
    former = hidden_beside(target, "old")
    replaced = os.path.lexists(target)
    if replaced:
        os.rename(target, former)  # a reader that comes now finds it: zero_to_fp32.recover
    try:
        os.rename(staged, target)
    except OSError:
        if replaced:
            os.rename(former, target)
        raise
    sync_folder(target.parent)
    if replaced:
        _replace(former, target)


def _replace(former: Path, target: Path) -> None:
    """Remove a checkpoint that was replaced, and leave what does not belong to it."""
    if former.is_dir() and not former.is_symlink():
        for path in former.iterdir():
            if not is_checkpoint_file(path.name) and not os.path.lexists(target / path.name):
                os.rename(path, target / path.name)
    _remove(former)


def announce(save_dir: Path, tag: str, save_latest: bool) -> None:
    """Put the script where DeepSpeed's users look for it, and at last let ``latest`` name the checkpoint."""
    replace_text(save_dir / SCRIPT, _script(), 0o755)
    if save_latest:
        replace_text(save_dir / "latest", tag)


def _script() -> str:
    return Path(zero_to_fp32.__file__).read_text(encoding="utf-8")


# -- leftovers ------------------------------------------------------------------------------------------------------


def remove_leftovers(save_dir: Path, target: Path) -> None:
    """Remove what killed processes have left; a whole checkpoint among it that is the only one gets its name back."""
    for path in [*target.parent.glob(".*.saving-*"), *target.parent.glob(".*.old-*")]:
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not _is_dead(path, match["host"], match["pid"], match["tag"] == target.name):
            continue
        home = path.with_name(match["tag"])
        if match["kind"] == "saving":
            _remove(path)
        elif os.path.lexists(home):
            _replace(path, home)
        elif zero_to_fp32.recover(home) == path:
            logger.warning("%s: a save that was killed left it as %s; it has its name again", home, path.name)
            os.rename(path, home)
    for path in save_dir.glob(".*.new"):
        text = _STAGED_TEXT.fullmatch(path.name)
        if text is not None and not psutil.pid_exists(int(text["pid"])):
            _remove(path)


def _is_dead(path: Path, host: str | None, pid: str | None, same_tag: bool) -> bool:
    """Whether ``path`` is not being written to any more, as far as can be told."""
    if host is None or pid is None:  # a name of an earlier version
        return same_tag or _untouched(path)
    if host == _host():
        return not psutil.pid_exists(int(pid))
    return _untouched(path)


def _untouched(path: Path) -> bool:
    try:
        newest = max(file.stat().st_mtime for file in (path, *path.glob("*")))
    except OSError:  # it goes away just now
        return False
    return time.time() - newest > LEFT_ALONE_S


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
