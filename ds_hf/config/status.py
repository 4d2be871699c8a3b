"""Says what becomes of settings that ds_hf knows and does not act upon.

A setting that changes the training and is not implemented is a fault (``x-status: unsupported``); one that only
tunes or reports is a warning with its reason (``no-effect``). Both only when it is switched on: not at its default,
or as ``x-on`` says. A block that carries a status speaks for everything inside it.
"""

from __future__ import annotations

from typing import Any

from ds_hf.config.check import show
from ds_hf.config.draft import Draft
from ds_hf.config.schema import Node, Path, holds, load_schema, pointer_of

__all__ = ["check_status"]


def check_status(draft: Draft, tree: dict[str, Any]) -> None:
    """Collect faults and warnings for what is switched on in ``tree`` (the draft's tree without faulty values)."""
    _object(draft, load_schema(), tree, ())


def _object(draft: Draft, node: Node, tree: dict[str, Any], path: Path) -> None:
    for key, value in tree.items():
        child = node.get("properties", {}).get(key)
        if child is None or child.get("deprecated"):
            continue
        here = (*path, key)
        status = child.get("x-status", "implemented")
        if status != "implemented":
            if _is_on(child, value):
                _report(draft, child, value, here)
        elif isinstance(value, str) and value.lower() in child.get("x-unsupported-values", {}):
            reason = child["x-unsupported-values"][value.lower()]
            fix = child.get("x-fix", "choose another")
            draft.fault(pointer_of(here), f"{show(value)} is not supported by ds_hf: {reason}", fix)
        elif isinstance(value, dict):
            _object(draft, child, value, here)


def _report(draft: Draft, node: Node, value: Any, path: Path) -> None:
    shown = "this block" if isinstance(value, dict) else show(value)
    reason = node["x-reason"]
    if node["x-status"] == "unsupported":
        fix = node.get("x-fix", f"remove it (default {show(node.get('default'))})")
        draft.fault(pointer_of(path), f"{shown} is not supported by ds_hf: {reason}", fix)
    else:
        draft.warn(pointer_of(path), f"no effect: {reason}")


def _is_on(node: Node, value: Any) -> bool:
    if "x-on" in node:
        return holds(node["x-on"], value)
    if isinstance(value, dict) and "properties" in node:
        return any(_is_on(node["properties"][key], item) for key, item in value.items() if key in node["properties"])
    if value == "auto" and node.get("x-auto"):
        return False
    return bool(value != node.get("default"))
