"""Tags under which checkpoints are written: names of folders inside the one that is given, of any depth.

What DeepSpeed's users take as tags is fine: numbers, losses, ``global_step10``, ``epoch=1-step=10``, ``run/best``,
names in any script, with spaces and dots. Refused is what would lead elsewhere, what ``latest`` could not name (it is
read without the spaces at its ends), and what readers take for files of a checkpoint or for what a killed save left.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from ds_hf.checkpoint.zero_to_fp32 import tag_fault
from ds_hf.errors import CheckpointPlaceError

__all__ = ["checked_tag", "is_checkpoint_file"]

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
