"""Puts the warnings of a configuration into one log message, grouped by reason."""

from __future__ import annotations

import logging

from ds_hf.config.schema import load_schema
from ds_hf.config.types.root import Config
from ds_hf.errors import Fault
from ds_hf.log import log_once

__all__ = ["grouped", "log_warnings"]

_NO_EFFECT = "no effect: "


def grouped(warnings: tuple[Fault, ...]) -> list[tuple[str, list[Fault]]]:
    """Warnings with the same text together, in order of first appearance."""
    groups: dict[str, list[Fault]] = {}
    for warning in warnings:
        groups.setdefault(warning.message, []).append(warning)
    return list(groups.items())


def log_warnings(config: Config) -> None:
    """Log the warnings of ``config``: one message, once for each content, on rank 0.

    Sizes that the Trainer fills in from the model are logged as information: nobody chose them.
    """
    chosen = tuple(w for w in config.warnings if not (w.message.startswith(_NO_EFFECT) and _from_model(w.pointer)))
    _log(config, chosen, logging.WARNING)
    _log(config, tuple(w for w in config.warnings if w not in chosen), logging.INFO)


def _from_model(pointer: str) -> bool:
    node = load_schema()
    for key in pointer[1:].split("/"):
        node = node.get("properties", {}).get(key, {})
    return bool(node.get("x-auto", {}).get("source") == "the model")


def _log(config: Config, warnings: tuple[Fault, ...], level: int) -> None:
    if not warnings:
        return
    lines = []
    for message, faults in grouped(warnings):
        names = ", ".join(fault.place[1:].replace("/", ".") for fault in faults)
        fix = f" ({faults[0].fix})" if faults[0].fix and len(faults) == 1 else ""
        lines.append(f"  {names}: {message}{fix}")
    log_once(f"{config.source}: {len(warnings)} setting(s) to look at\n" + "\n".join(lines), level)
