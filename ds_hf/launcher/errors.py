"""What the launcher refuses, with the place of the mistake."""

from __future__ import annotations

from ds_hf.errors import DsHfError

__all__ = ["LaunchError", "mistake"]


class LaunchError(DsHfError, ValueError):
    """A run cannot be started as asked; the text names the place and the fix."""


def mistake(source: str, line: int, column: int, text: str, message: str, fix: str) -> LaunchError:
    """A ``LaunchError`` that points at ``column`` (1-based) of ``text``, which is line ``line`` of ``source``."""
    start = max(0, column - 1 - 60)  # the middle of a very long line is enough
    shown = "".join(char if char.isprintable() else "?" for char in text[start : start + 100])
    pointer = " " * (column - 1 - start) + "^"
    return LaunchError(f"{source}, line {line}, column {column}: {message}\n    {shown}\n    {pointer}\n  fix: {fix}")
