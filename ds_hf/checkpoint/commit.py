"""Making a checkpoint visible, under which tags, and what saves that were killed have left.

Files are written into ``.TAG.saving-HOST-PID-ID`` beside the target. The target appears by one rename; a former one of
the same tag is renamed to ``.TAG.old-HOST-PID-ID`` before and removed after, so at every moment one of the two is
whole, and ``recover`` finds it. Their writer holds these folders (``FolderHold``): one that is not held is left over,
also where the number of its process is another's today. What else lay in a replaced folder, a user's notes or a
checkpoint of a tag below, moves to the new one. ``latest`` is written last. Only rank 0 calls what is here.

Tags are names of folders of any depth. What DeepSpeed's users take as tags is fine: numbers, losses, ``global_step10``,
``epoch=1-step=10``, ``run/best``, names in any script, with spaces and dots. Refused is what would lead elsewhere, what
``latest`` could not name (it is read without the spaces at its ends), and what readers take for files of a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from ds_hf.checkpoint.files import replace_text, write_text
from ds_hf.checkpoint.format import MANIFEST, SCRIPT
from ds_hf.checkpoint.holds import FolderHold, boot_of, make_folder, sync, this_writer, untouched
from ds_hf.checkpoint.manifest import sealed
from ds_hf.checkpoint.places import recover, tag_fault
from ds_hf.checkpoint.reports import RankReport, complete
from ds_hf.checkpoint.standalone import standalone_script
from ds_hf.errors import CheckpointError, CheckpointPlaceError
from ds_hf.log import logger
from ds_hf.printable import size_text

__all__ = [
    "announce",
    "check_space",
    "checked_tag",
    "commit",
    "hidden_beside",
    "is_checkpoint_file",
    "make_room",
    "publish",
    "remove_leftovers",
    "stage",
]

_HIDDEN = re.compile(
    r"\.(?P<tag>.+)\.(?P<kind>saving|old)-(?:(?P<host>\w+)-(?P<pid>\d+)-)?"
    r"(?:(?P<boot>[0-9a-f]{16})_)?(?P<id>\w+)"
)
_STAGED_TEXT = re.compile(rf"\.(latest|{re.escape(SCRIPT)})\.(?P<pid>\d+)\.new")


def hidden_beside(target: Path, kind: str, writer: str | None = None) -> Path:
    """A new name beside ``target`` that no search for checkpoints finds; ``kind`` is "saving" or "old"."""
    return target.with_name(f".{target.name}.{kind}-{writer or this_writer()}")


@contextmanager
def stage(target: Path, nbytes: int, *, over: bool = False) -> Iterator[Path]:
    """A new folder beside ``target``, to be given to ``publish`` when it is whole.

    Args:
        over: ``target`` may exist, and is then replaced.

    Raises:
        CheckpointError: ``target`` exists, or ``nbytes`` do not fit there.
    """
    if not over and target.exists():
        raise CheckpointError(f"{target} exists: give another tag or folder")
    staged = hidden_beside(target, "saving")
    hold = make_room(staged, target, nbytes)
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        hold.close()


def make_room(staged: Path, target: Path, nbytes: int, save_dir: Path | None = None) -> FolderHold:
    """The new folder ``staged``, held, on a disk with room; what killed writers left beside ``target`` goes first."""
    remove_leftovers(target.parent if save_dir is None else save_dir, target)
    check_space(target.parent, nbytes)
    make_folder(staged.parent)
    return FolderHold(staged, made=True)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise ``CheckpointError`` if ``nbytes`` do not fit on the file system of ``folder``."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        usage = shutil.disk_usage(place)
    except OSError:  # a file system that does not tell
        return
    if usage.total and usage.free < nbytes:
        raise CheckpointError(
            f"{folder} has {size_text(usage.free)} free and the checkpoint needs {size_text(nbytes)}, "
            f"{size_text(nbytes - usage.free)} more; nothing was written. Remove something there or save elsewhere (a "
            "checkpoint of the same tag is only removed once the new one is whole)"
        )


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
    write_text(staged / SCRIPT, standalone_script(), 0o755)
    write_text(staged / MANIFEST, sealed(manifest))
    publish(staged, target, over=True)


def publish(staged: Path, target: Path, *, over: bool = False) -> None:
    """Give a folder that is whole its name; ``over``: in place of what had it, which readers in between ``recover``."""
    sync(staged)
    former = hidden_beside(target, "old")
    replaced = over and os.path.lexists(target)
    hold = FolderHold(target) if replaced and target.is_dir() else None  # before another finds it under its hidden name
    if replaced:
        os.rename(target, former)
    try:
        os.rename(staged, target)
    except OSError:
        if replaced:
            os.rename(former, target)
        raise
    sync(target.parent)
    if replaced:
        _replace(former, target)
    if hold is not None:
        hold.close()


def _replace(former: Path, target: Path) -> None:
    """Remove a checkpoint that was replaced, and leave what does not belong to it."""
    if former.is_dir() and not former.is_symlink():
        for path in former.iterdir():
            if not is_checkpoint_file(path.name) and not os.path.lexists(target / path.name):
                os.rename(path, target / path.name)
    _remove(former)


def announce(save_dir: Path, tag: str, save_latest: bool) -> None:
    """Put the script where DeepSpeed's users look for it, and at last let ``latest`` name the checkpoint."""
    replace_text(save_dir / SCRIPT, standalone_script(), 0o755)
    if save_latest:
        replace_text(save_dir / "latest", tag)


# -- leftovers ------------------------------------------------------------------------------------------------------


def remove_leftovers(save_dir: Path, target: Path) -> None:
    """Remove what killed processes have left; a whole checkpoint among it that is the only one gets its name back."""
    FolderHold.remove_unnamed(target.parent)
    for path in [*target.parent.glob(".*.saving-*"), *target.parent.glob(".*.old-*")]:
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not _is_dead(path, match, match["tag"] == target.name):
            continue
        home = path.with_name(match["tag"])
        if match["kind"] == "saving":
            _remove(path)
        elif os.path.lexists(home):
            _replace(path, home)
        elif recover(home) == path:
            logger.warning("%s: a save that was killed left it as %s; it has its name again", home, path.name)
            os.rename(path, home)
    for path in save_dir.glob(".*.new"):
        text = _STAGED_TEXT.fullmatch(path.name)
        if text is not None and not _runs(int(text["pid"]), path):
            _remove(path)


def _is_dead(path: Path, writer: re.Match[str], same_tag: bool) -> bool:
    """Whether ``path`` is not being written to any more, as far as can be told."""
    lives = FolderHold.lives(path)
    if lives:
        return False
    host, pid, boot, here = writer["host"], writer["pid"], writer["boot"], boot_of()
    if host is None or pid is None:  # a name of an earlier version
        return same_tag or untouched(path)
    if boot is not None and boot[:8] == here[:8] and lives is False:
        return True
    if (boot == here) if boot is not None else (host == this_writer().partition("-")[0]):
        return not _runs(int(pid), path)
    return untouched(path)  # another machine, process namespace or start, whose processes and locks are not seen here


def _runs(pid: int, path: Path) -> bool:
    """Whether the process with that number may be the one that made ``path``: neither younger nor dead."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= path.stat().st_mtime + 1)
    except (psutil.NoSuchProcess, OSError):
        return False
    except psutil.Error:
        return True


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


# -- tags --------------------------------------------------------------------------------------------------------------


_IN_A_CHECKPOINT = r"manifest\.json|zero_to_fp32\.py|rank_\d+\.safetensors|.*_states\.pt|\.metadata|__\d+_\d+\.distcp"
_BESIDE_ONE = r"latest|model.*\.safetensors(\.index\.json)?"
_STAGED = re.compile(r"\..+\.(saving-.+|old-.+|new)")


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of that name in a checkpoint's folder is a part of it, of ours or of another library's."""
    return re.fullmatch(_IN_A_CHECKPOINT, name) is not None


def checked_tag(tag: str) -> str:
    """``tag`` in its plain form (``a/b`` for ``a//b/``), if a checkpoint can be written under it.

    Raises:
        CheckpointPlaceError: it cannot; nothing was looked at on disk.
    """
    fault = tag_fault(tag) or _unwritable(tag)
    if fault:
        raise CheckpointPlaceError(
            f"{tag[:200]!r} cannot be the tag of a checkpoint: {fault}. Give the name of a folder, as global_step10 is"
        )
    return str(PurePosixPath(tag))


def _unwritable(tag: str) -> str:
    if "\\" in tag:
        return "it has a backslash"
    for part in PurePosixPath(tag).parts:
        if part != part.strip():
            return "it has spaces at an end, which 'latest' does not keep"
        if re.fullmatch(f"{_IN_A_CHECKPOINT}|{_BESIDE_ONE}", part.lower()):
            return f"{part!r} is the name of a file that readers of checkpoints look for"
        if _STAGED.fullmatch(part):
            return f"{part!r} is what an unfinished save is called, which the next save removes"
    return ""
