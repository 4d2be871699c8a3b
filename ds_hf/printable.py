"""Text from files, for terminals: names and contents that strangers chose must not steer one.

Everything that quotes a file's name or content comes through here: ``DsHfError`` and the logger's arguments by
themselves, commands by their own call. Rejected: ``repr``, which spells every quote and accent of honest names anew.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TypeVar

__all__ = ["counted", "harmless", "printable", "printable_json", "size_text", "speak_any_language"]

E = TypeVar("E", bound=BaseException)


def printable(text: object) -> str:
    """``str(text)``, with what is neither printable nor a line break as an escape: ``\\x1b``, ``\\t``, ``\\u202e``."""
    plain = str(text)
    if plain.replace("\n", "").isprintable():
        return plain
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in plain)


def size_text(nbytes: int) -> str:
    """As ``1.50 GB``, in the unit that suits it."""
    value, units = float(nbytes), ("B", "KB", "MB", "GB", "TB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError


def printable_json(value: Any) -> str:
    """Indented JSON that is readable and has no such characters either; still the same value to who parses it."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def harmless(error: E) -> E:
    """``error`` itself, its text made printable: as the cause of one of ours it stands in tracebacks, with what another
    library quotes of a file."""
    error.args = tuple(printable(value) if isinstance(value, str) else value for value in error.args)
    return error


def speak_any_language() -> None:
    """Commands print as an escape what the encoding of a terminal or pipe lacks (ASCII, Latin-1)."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":  # else there is none, or it knows a way
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def counted(number: int, one: str, more: str) -> str:
    """``1 launch``, ``2 launches``."""
    return f"{number} {one if number == 1 else more}"
