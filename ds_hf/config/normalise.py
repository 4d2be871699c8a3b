"""Brings values to the form that the schema asks for, where there is no doubt about what was meant.

Numbers and booleans given as texts (command lines do that) are converted with one warning; ``5e8`` where an integer
is expected, other letter case of a fixed word, and DeepSpeed's synonyms of a number format are converted silently.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ds_hf.config.draft import Draft
from ds_hf.config.parse import escape
from ds_hf.config.schema import Node, pointer_of, types_of, walk_for

__all__ = ["normalise"]

_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]{1,40}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?\s*")
_INFINITE = {"inf", "infinity", "+inf"}
_LARGEST = 2**63 - 1


def normalise(draft: Draft) -> None:
    """Convert what can be converted in ``draft.tree``."""
    texts: list[str] = []
    for path, node in walk_for(draft.tree):
        if not draft.has(path):
            continue
        parent = draft.get(path[:-1])
        value = parent[path[-1]]
        if isinstance(value, list):
            item = node.get("items", {})
            new: Any = [_normal(item, one) for one in value] if isinstance(item, dict) else value
            was_text = any(isinstance(a, str) and not isinstance(b, str) for a, b in zip(value, new, strict=True))
        else:
            new = _normal(node, value)
            was_text = isinstance(value, (str, int)) and not isinstance(value, bool) and isinstance(new, bool)
            was_text = was_text or (isinstance(value, str) and not isinstance(new, str))
        parent[path[-1]] = new
        if was_text and not (path[-1] == "steps_per_print" and isinstance(new, float) and math.isinf(new)):
            texts.append(pointer_of(path))
    if texts:
        names = ", ".join(pointer[1:].replace("/", ".") for pointer in texts)
        draft.warn(texts[0], f"read as plain JSON values: {names}", "write numbers and booleans without quotes")
    _check_range(draft.tree, "", draft)


def _normal(node: Node, value: Any) -> Any:
    kinds = types_of(node)
    if isinstance(value, str):
        return _from_text(node, kinds, value)
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds and math.isfinite(value):
        return int(value) if value.is_integer() else round(value) if node.get("x-round") else value
    if value in (0, 1) and isinstance(value, int) and "boolean" in kinds and not kinds & {"integer", "number"}:
        return bool(value)
    return value


def _from_text(node: Node, kinds: set[str], value: str) -> Any:
    folded = value.strip().lower()
    if folded in node.get("x-value-aliases", {}):
        return node["x-value-aliases"][folded]
    for choice in node.get("enum", []):
        if isinstance(choice, str) and choice.lower() == folded:
            return choice
    free_text = "string" in kinds and "pattern" not in node and "enum" not in node
    if free_text:
        return value
    if "boolean" in kinds and folded in ("true", "false"):
        return folded == "true"
    if kinds & {"integer", "number"}:
        if folded in _INFINITE and "number" in kinds:
            return math.inf
        if _NUMBER.fullmatch(value):
            return _normal(node, int(value) if re.fullmatch(r"\s*[-+]?[0-9]+\s*", value) else float(value))
    return value


def _check_range(value: Any, pointer: str, draft: Draft) -> None:
    """Numbers that no setting can mean: NaN, infinities (but for steps_per_print), and beyond 64 bits."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_range(item, f"{pointer}/{escape(key)}", draft)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_range(item, f"{pointer}/{index}", draft)
    elif isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value) or value < 0 or pointer != "/steps_per_print":
            draft.fault(pointer, f"{value} is not a usable number", "give a finite number")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        draft.fault(pointer, "the number does not fit into 64 bits", "give a smaller one")
