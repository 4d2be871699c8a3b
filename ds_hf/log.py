"""The one logger of ds_hf (``deepspeed.utils.logger`` is this object) and rank-aware helpers."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from ds_hf.printable import printable

__all__ = ["complain", "forget_said", "log_once", "logger", "say", "set_log_level_from_string", "warn_once"]


class _Arguments(logging.Filter):
    """What is put into a message (names, contents of files) cannot steer a terminal; its own text is the caller's."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                printable(value) if isinstance(value, str | Path | BaseException) else value for value in record.args
            )
        return True


logger = logging.getLogger("ds_hf")
logger.addFilter(_Arguments())
_seen: set[str] = set()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """``"debug"``, ``"info"``, ``"warning"``, ``"error"`` or ``"critical"``.

    Raises:
        ValueError: another word.
    """
    level = logging.getLevelName(log_level_str.upper())
    if not isinstance(level, int):
        raise ValueError(f"{log_level_str!r} is not a logging level: debug, info, warning, error, critical")
    (custom_logger or logger).setLevel(level)


def log_once(message: str, level: int = logging.INFO, *, everywhere: bool = False) -> None:
    """Log ``message`` once a process, on rank 0 only unless ``everywhere``."""
    if message not in _seen:
        _seen.add(message)
        if everywhere or _rank() == 0:
            logger.log(level, "%s", message)


def forget_said() -> None:
    """What was said once may be said again: for tests and long-lived processes that begin anew."""
    _seen.clear()


def warn_once(message: str, about: str | None = None, *, everywhere: bool = False) -> None:
    """Warn with ``message`` once a process, on rank 0 only unless ``everywhere``; with one message of all that are
    ``about`` the same."""
    if about is None or about not in _seen:
        if about is not None:
            _seen.add(about)
        log_once(message, logging.WARNING, everywhere=everywhere)


def say(text: str) -> None:
    """What the user asked for, on standard output."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def complain(text: object) -> None:
    """What is wrong, on standard error, in the one form that all commands have: ``ds_hf: what`` and lines below it.

    In one write, as several processes may share the stream; one that is gone is no second fault.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(f"ds_hf: {text}\n"))
        sys.stderr.flush()
