"""What this process logs, as texts."""

from __future__ import annotations

import logging

__all__ = ["Lines"]


class Lines(logging.Handler):
    """``logging.getLogger("ds_hf").addHandler(Lines())``; of ``level`` and above."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
