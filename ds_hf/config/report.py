"""Puts the warnings of a configuration into one log message, grouped by reason."""

from __future__ import annotations

from ds_hf.config.types.root import Config
from ds_hf.errors import Fault
from ds_hf.log import warn_once

__all__ = ["grouped", "log_warnings"]

_NO_EFFECT = "no effect: "


def grouped(warnings: tuple[Fault, ...]) -> list[tuple[str, list[Fault]]]:
    """Warnings with the same text together, in order of first appearance."""
    groups: dict[str, list[Fault]] = {}
    for warning in warnings:
        groups.setdefault(warning.message, []).append(warning)
    return list(groups.items())


def log_warnings(config: Config) -> None:
    """Log the warnings of ``config``: one message, once for each content, on rank 0."""
    if not config.warnings:
        return
    lines = []
    for message, faults in grouped(config.warnings):
        names = ", ".join(fault.pointer[1:].replace("/", ".") for fault in faults)
        fix = f" ({faults[0].fix})" if faults[0].fix and len(faults) == 1 else ""
        lines.append(f"  {names}: {message}{fix}")
    warn_once(f"{config.source}: {len(config.warnings)} setting(s) to look at\n" + "\n".join(lines))
