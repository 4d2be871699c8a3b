"""Moves older spellings to today's keys, with one warning each: the configurations of 2020 keep working.

The schema says where a key went (``x-renamed-to``) and how its value changes (``x-convert``); a block given as a
plain boolean is spelt out (``x-shorthand``). An older key beside its replacement is a fault. Top-level keys with
dots, which trl writes, are taken out: DeepSpeed ignores them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_hf.config.draft import Draft
from ds_hf.config.schema import Node, Path, dotted, holds, load_schema, pointer_of, walk_for
from ds_hf.config.types.root import Origin, OriginKind

__all__ = ["rename"]

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
