"""Builds the frozen ``Config`` from a tree that passed the schema, and tells where each value came from.

A key that is a keyword of Python (``async``) has a field with an underscore after it.
"auto" that is still there counts as absent: the default applies, and ``provenance`` says who fills it in.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from ds_hf.config.draft import Draft
from ds_hf.config.schema import Node, load_schema, pointer_of, types_of, walk_for
from ds_hf.config.types.root import Config, Origin, OriginKind

__all__ = ["build", "provenance"]

_T = TypeVar("_T")


def build(tree: dict[str, Any], source: str = "config") -> Config:
    """The typed configuration of ``tree``."""
    config = _section(Config, tree, load_schema())
    return dataclasses.replace(config, source=source)


def _section(cls: type[_T], tree: dict[str, Any], node: Node) -> _T:
    kind: Any = cls
    values: dict[str, Any] = {}
    for name, section in _fields(kind).items():
        key = name.removesuffix("_")
        child: Node | None = node["properties"].get(key)
        if child is None or key not in tree:
            continue
        value = tree[key]
        if value == "auto" and child.get("x-auto") not in (None, "literal"):
            continue
        if section is not None:
            if isinstance(value, dict) and all(key in value for key in child.get("required", [])):
                values[name] = _section(section, value, child)
        else:
            values[name] = _scalar(value, child)
    return cls(**values)


def _scalar(value: Any, node: Node) -> Any:
    if isinstance(value, list):
        return tuple(value)
    kinds = types_of(node)
    if "array" in kinds and isinstance(value, str) and node.get("pattern") is None:
        return (value,)
    if isinstance(value, int) and not isinstance(value, bool) and "number" in kinds and "integer" not in kinds:
        return float(value)
    return value


@functools.cache
def _fields(cls: type[Any]) -> dict[str, type[Any] | None]:
    """Field names, each with its section class when it is a section."""
    hints = typing.get_type_hints(cls)
    return {field.name: _section_class(hints[field.name]) for field in dataclasses.fields(cls)}


def _section_class(hint: Any) -> type[Any] | None:
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((choice for choice in choices if dataclasses.is_dataclass(choice) and isinstance(choice, type)), None)


def provenance(draft: Draft) -> dict[str, Origin]:
    """Where each effective value came from, by pointer, in the order of the schema."""
    result: dict[str, Origin] = {}
    for path, node in walk_for(draft.tree):
        if node.get("deprecated") or ("properties" in node and draft.get(path) != {}) or path[0] == "$schema":
            continue
        parent = draft.get(path[:-1])
        pointer = pointer_of(path)
        if isinstance(parent, dict) and path[-1] in parent:
            result[pointer] = _origin(draft, pointer, parent[path[-1]], node)
        elif "default" in node and _applies(draft, path):
            result[pointer] = Origin(OriginKind.DEFAULT)
    return result


def _origin(draft: Draft, pointer: str, value: Any, node: Node) -> Origin:
    if value == "auto" and isinstance(node.get("x-auto"), dict):
        return Origin(OriginKind.AUTO, node["x-auto"]["source"], draft.lines.get(pointer))
    if pointer in draft.origins:
        return draft.origins[pointer]
    moved = next((draft.origins[around] for around in _around(pointer) if around in draft.origins), None)
    return moved or Origin(OriginKind.USER, "", draft.lines.get(pointer))


def _around(pointer: str) -> list[str]:
    parts = pointer.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 1, -1)]


def _applies(draft: Draft, path: tuple[str, ...]) -> bool:
    """Whether a default is in force: an optimizer or schedule that is not there has none."""
    if path[0] in ("optimizer", "scheduler"):
        section = draft.tree.get(path[0])
        if not isinstance(section, dict):
            return False
        if path[:2] == ("optimizer", "params") and len(path) > 2:
            return str(section.get("type", "")).lower() in ("adam", "adamw") and path[-1] in (
                "lr",
                "betas",
                "eps",
                "weight_decay",
            )
    return True
