"""Checkpoints that tests keep as archives."""

from __future__ import annotations

import tarfile
from pathlib import Path

__all__ = ["unpack"]


def unpack(archive: Path, folder: Path) -> None:
    """Extract ``archive`` into ``folder``."""
    with tarfile.open(archive) as opened:
        # an argument of extractall() in Python 3.11.4 and later only
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        opened.extractall(folder)
