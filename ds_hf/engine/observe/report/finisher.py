"""The process that makes a page of what was recorded when training is over, however it came to its end.

It waits for a line on its standard input. When the process of rank 0 is killed, the end of that input wakes it as well.
Until then it has loaded nothing; it is in a session of its own, so that what ends the run does not end it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["Finisher"]

PATIENCE_S = 60.0
_CODE = (
    "import sys\n"
    "asked = sys.stdin.readline()\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from ds_hf.profile.finish import finish\n"
    "finish(sys.argv[2], ended=bool(asked))\n"
)


class Finisher:
    """Of one folder, started by rank 0. It ends with the training, or a few seconds later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = str(Path(__file__).parents[3])  # where the package lies
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no process can be made: ds-hf profile FOLDER makes the page
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, root, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Everything is recorded: make the page, beside what else goes on."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"end\n")
                self._process.stdin.close()
            self._process.stdin = None

    def words(self) -> str:
        """The paragraph that the page ends with, once it is made; empty where it could not be."""
        if self._process is None:
            return ""
        self.finish()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return ""
        try:
            return (self.folder / "verdict.txt").read_text("utf-8").rstrip()
        except OSError:
            return ""
