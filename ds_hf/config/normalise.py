"""Brings values to the form that the schema asks for, where there is no doubt about what was meant.

Numbers and booleans given as texts (command lines do that) are converted with one warning; ``5e8`` where an integer
is expected, other letter case of a fixed word, and DeepSpeed's synonyms of a number format are converted silently.

``rename`` moves older spellings to today's keys, with one warning each: the configurations of 2020 keep working.

The schema says where a key went (``x-renamed-to``) and how its value changes (``x-convert``); a block given as a
plain boolean is spelt out (``x-shorthand``). An older key beside its replacement is a fault. Top-level keys with
dots, which trl writes, are taken out: DeepSpeed ignores them too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from ds_hf.config.draft import Draft
from ds_hf.config.schema import Node, Path, dotted, escape, holds, load_schema, pointer_of, types_of, walk_for
from ds_hf.config.types.root import Origin, OriginKind

__all__ = ["normalise", "rename"]

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


# -- older keys --------------------------------------------------------------------------------------------------------


_SKIP = object()


def rename(draft: Draft) -> None:
    """Bring ``draft.tree`` to today's spelling."""
    _drop_dotted(draft)
    _shorthands(draft)
    for path, node in walk_for(draft.tree):
        if not node.get("deprecated") or not draft.has(path):
            continue
        if node.get("x-convert") == "drop":
            draft.warn(pointer_of(path), f"ignored: {node['x-reason']}", "remove it")
            draft.drop(path)
        else:
            _move(draft, path, node)
    _shorthands(draft)


def _drop_dotted(draft: Draft) -> None:
    known = set(load_schema()["properties"])
    for key in [key for key in draft.tree if "." in key and key not in known]:
        section, _, rest = key.partition(".")
        if section in known:
            draft.warn(
                pointer_of((key,)), "ignored: a key with a dot is not a path", f'write "{rest[:60]}" inside "{section}"'
            )
            draft.drop((key,))


def _shorthands(draft: Draft) -> None:
    """Spell out blocks that are given as one boolean."""
    for key, node in load_schema()["properties"].items():
        value = draft.tree.get(key)
        if "x-shorthand" not in node or not isinstance(value, bool):
            continue
        staged = node["x-shorthand"] == "stage-if-true"
        inner, converted = ("stage", int(value)) if staged else ("enabled", value)
        shown = str(converted).lower()
        was = str(value).lower()
        draft.warn(f"/{key}", f"{was} is the form used in 2020", f'write "{key}": {{"{inner}": {shown}}}')
        origin = Origin(OriginKind.RENAMED, f"{key}: {was}", draft.line(f"/{key}"))
        draft.tree[key] = {}
        draft.put((key, inner), converted, origin)


def _move(draft: Draft, path: Path, node: Node) -> None:
    pointer = pointer_of(path)
    value = draft.get(path)
    target = tuple(node["x-renamed-to"].strip("/").split("/"))
    line = draft.line(pointer)
    if not _right_type(value, node):
        return  # The schema check reports the wrong type where the user wrote it.
    converted = _CONVERTERS[node.get("x-convert", "same")](value, draft)
    if draft.has(target) and node.get("x-convert") != "pin-memory":
        draft.fault(
            pointer, f"{dotted(path)} is the older name of {dotted(target)}, and both are set", f'remove "{path[-1]}"'
        )
        draft.drop(path)
        return
    draft.drop(path)
    if converted is _SKIP:
        if value is not None:
            draft.warn(pointer, f"older form of {dotted(target)}, and switched off", "remove it")
        return
    draft.warn(pointer, f"older name of {dotted(target)}, which is set instead")
    origin = Origin(OriginKind.RENAMED, dotted(path), line)
    targets = [target]
    if node.get("x-convert") == "pin-memory":
        blocks = [("zero_optimization", name) for name in ("offload_optimizer", "offload_param")]
        targets = [(*block, "pin_memory") for block in blocks if isinstance(draft.get(block), dict)]
    for one in targets:
        if not draft.put(one, converted, origin):
            draft.fault(pointer, f"cannot move it to {dotted(one)}, which is not an object", f"use {dotted(one)}")


def _right_type(value: Any, node: Node) -> bool:
    bare: Node = {key: node[key] for key in ("type", "minimum", "exclusiveMinimum", "maximum") if key in node}
    return value is None or holds(bare, value)


def _same(value: Any, draft: Draft) -> Any:
    return _SKIP if value is None else value


def _cpu_device(value: Any, draft: Draft) -> Any:
    return {"device": "cpu"} if value is True else _SKIP


def _fp32_if_true(value: Any, draft: Draft) -> Any:
    return "fp32" if value is True else _SKIP


_CONVERTERS: dict[str, Callable[[Any, Draft], Any]] = {
    "same": _same,
    "cpu-device": _cpu_device,
    "fp32-if-true": _fp32_if_true,
    "pin-memory": _same,
}
