"""The folder of a report: one file a rank, of JSON lines, to which lines are added and nothing else.

========  =======================================================================================================
line      fields
========  =======================================================================================================
header    what ran: see ``header``
keys      number of a key -> its fields, before the first step that uses it
step      number, ``begin`` (seconds on the rank's clock), ``seconds``, ``samples``, ``tokens``, ``spans`` and
          ``beside`` (communication streams): key, microseconds since the step began, microseconds
memory    bytes by kind at each point of one step
experts   of each layer of them its name, and how many routes of this rank each expert had
end       training is over
========  =======================================================================================================
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from ds_hf.errors import ConfigError

__all__ = ["ReportFile", "rank_path", "require_writable"]

POINTER = "ds_hf.report"


def rank_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank_{rank:05d}.jsonl"


def require_writable(folder: str | Path, option: str | None = None) -> Path:
    """The folder, made if it is not there.

    Args:
        option: of a command that names it, in place of the configuration's key.

    Raises:
        ConfigError: nothing can be written there.
    """
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        named = (
            f"{path}, which cannot be written to on {socket.gethostname()} ({error.strerror}): give a folder that can"
        )
        if option is not None:
            raise ConfigError(f"{option} names {named}") from error
        raise ConfigError(f'"report" names {named}, or remove the key', POINTER) from error
    return path


class ReportFile:
    """What one rank has recorded. A new run begins a new file; what a killed run left is replaced.

    Raises:
        ConfigError: it cannot be written to.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = rank_path(folder, rank)
        try:
            self.path.unlink(missing_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            message = f"{self.path} cannot be written to ({error.strerror}): remove it, or give another folder"
            raise ConfigError(message, POINTER) from error
        self.fault = ""

    def add(self, *lines: dict[str, Any]) -> None:
        """Add lines in one write: a run that is killed leaves whole lines. A disk that is full ends the recording, and
        not the training; ``fault`` says so."""
        if self.fault:
            return
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            while text:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            self.fault = f"{self.path} cannot be written to any more ({error.strerror})"

    def close(self) -> None:
        """Nothing more comes."""
        self.fault = self.fault or "closed"
        os.close(self._file)
