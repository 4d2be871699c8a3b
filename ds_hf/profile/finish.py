"""What the process does that waited for the end of a recorded run (``engine/observe/report/finisher.py``)."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from ds_hf.engine.observe.report.files import rank_path
from ds_hf.errors import DsHfError
from ds_hf.log import complain
from ds_hf.profile.report import PAGE, write_report

__all__ = ["finish"]

OTHERS_S = 3.0  # for the other ranks' last lines
_END = b'{"end":'


def finish(folder: str, *, ended: bool) -> None:
    """Make the page.

    Args:
        ended: training came to its end; otherwise its process is gone, and this says where the page is.
    """
    path = Path(folder)
    until = time.monotonic() + OTHERS_S
    while ended and time.monotonic() < until and not _all_ended(path):
        time.sleep(0.05)
    try:
        write_report(path)
    except (DsHfError, OSError) as error:
        complain(f"there is no page of the report: {error}")
        sys.exit(1)
    if not ended:
        with suppress(OSError):
            complain(f"training did not come to its end; what was recorded until then: {path / PAGE}")


def _all_ended(folder: Path) -> bool:
    """Whether every file ends with its last line; a single look at the ends of files."""
    files = sorted(folder.glob(rank_path(Path(), 0).name.replace("00000", "*")))
    for file in files:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - 256))
            if _END not in opened.read():
                return False
    return bool(files)
