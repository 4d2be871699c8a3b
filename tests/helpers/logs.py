"""What this process logs, as texts."""

from __future__ import annotations

import logging

__all__ = ["Lines"]


class Lines(logging.Handler):
    """``logging.getLogger("ds_hf").addHandler(Lines())``."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
