"""The one logger of ds_hf (``deepspeed.utils.logger`` is this object) and rank-aware helpers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ds_hf.printable import printable

__all__ = [
    "announce",
    "complain",
    "forget_said",
    "log_once",
    "logger",
    "own_version",
    "say",
    "set_log_level_from_string",
    "warn_once",
]


class _Arguments(logging.Filter):
    """What is put into a message (names, contents of files) cannot steer a terminal; its own text is the caller's."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                printable(value) if isinstance(value, str | Path | BaseException) else value for value in record.args
            )
        return True


class _WhereNoneIs(logging.Handler):
    """Writes to standard error where the script has configured no handler: Python's own last resort drops what is below
    a warning, also where a level was asked for."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.handlers == [self] and not logging.getLogger().handlers:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()


logger = logging.getLogger("ds_hf")
logger.addFilter(_Arguments())
logger.addHandler(_WhereNoneIs())
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


@functools.cache
def own_version() -> str:
    """Of ds_hf, as it is installed."""
    try:
        return version("ds-hf")
    except PackageNotFoundError:
        return "unknown"


def announce(message: str) -> None:
    """What a run says of itself: information, once a process, also where no level was chosen.

    The level of a root logger that nothing has set, a warning, hides it from the loggers of others; the one of this
    logger (``log_level``), ``logging.disable``, or any other of the root is obeyed.
    """
    root = logging.getLogger().level
    chosen = logger.level or (logging.INFO if root == logging.WARNING else root)
    if message in _seen or chosen > logging.INFO or logger.disabled or logging.root.manager.disable >= logging.INFO:
        return
    _seen.add(message)
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None))


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
