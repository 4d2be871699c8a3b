"""Loads ``ds_config.schema.json`` and answers questions about it.

The schema is the only table of keys: its ``x-`` annotations say which keys the Trainer fills (``x-auto``), what
ds_hf does with a key (``x-status``, ``x-reason``, ``x-fix``, ``x-on``, ``x-unsupported-values``), where an older
key went (``x-renamed-to``, ``x-convert``), what a default used to be (``x-changed``) and how values may be written
(``x-value-aliases``, ``x-round``, ``x-shorthand``). A key that is nothing but another name of one beside it is a
``$ref`` to that; ``load_schema`` gives it what that has, and ``x-alias-of``. Paths are tuples of keys; pointers are
RFC 6901 texts.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator
from importlib import resources
from typing import Any, cast

from jsonschema import Draft202012Validator

__all__ = [
    "Node",
    "Path",
    "dotted",
    "escape",
    "foreign_name",
    "holds",
    "is_other_name",
    "load_schema",
    "nearest",
    "pointer_of",
    "schema_address",
    "schema_moved",
    "schema_text",
    "types_of",
    "walk",
    "walk_for",
    "walk_sections",
]

_SCHEMA = resources.files("ds_hf") / "schemas" / "ds_config.schema.json"

Node = dict[str, Any]
Path = tuple[str, ...]


def schema_address() -> str:
    """The installed schema, for ``"$schema"``: absolute, so that a file may be moved."""
    return pathlib.Path(str(_SCHEMA)).resolve().as_uri()


def schema_moved(tree: Node, before: str) -> Node:
    """``tree``, of the file ``before``, for another folder: what a relative ``"$schema"`` leads to is absolute then."""
    given = tree.get("$schema")
    if not isinstance(given, str) or "://" in given or given.startswith(("/", "urn:")):
        return tree
    found = (pathlib.Path(before).parent / given).resolve()
    return {**tree, "$schema": found.as_uri() if found.is_file() else schema_address()}


def schema_text() -> str:
    """The text of the JSON Schema."""
    return _SCHEMA.read_text("utf-8")


@functools.cache
def load_schema() -> Node:
    """The JSON Schema; shared, not to be changed."""
    schema = cast(Node, json.loads(schema_text()))
    for _, section in walk(schema):
        keys = section.get("properties", {})
        for key, node in keys.items():
            if "$ref" in node and "title" in node:
                name = node["$ref"].rpartition("/")[2]
                keys[key] = {**keys[name], "title": node["title"], "description": node["description"]}
                keys[key]["x-alias-of"] = name
                keys[name].setdefault("x-aliases", []).append(key)
    return schema


def is_other_name(node: Node) -> bool:
    """Whether ``node`` is of an older name, or of a second one: values move from it to the key that has them."""
    return bool(node.get("deprecated")) or "x-alias-of" in node


def escape(key: str) -> str:
    """One reference token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


@functools.lru_cache(maxsize=4096)
def pointer_of(path: Path) -> str:
    """RFC 6901 pointer of a path."""
    return "".join("/" + escape(key) for key in path)


def dotted(path: Path) -> str:
    """A path as people write it: ``zero_optimization.stage``."""
    return ".".join(path)


def holds(condition: Node, value: Any) -> bool:
    """Whether ``value`` satisfies a small schema (``x-on``)."""
    return bool(Draft202012Validator(condition).is_valid(value))


def walk(node: Node | None = None, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every key that has a fixed name, parents before children."""
    node = load_schema() if node is None else node
    for key, child in node.get("properties", {}).items():
        here = (*path, key)
        yield here, child
        if "x-alias-of" not in child:
            yield from walk(child, here)


def walk_for(tree: Node) -> tuple[tuple[Path, Node], ...]:
    """``walk`` plus the parameters of the schedule that ``tree`` names."""
    return _walk_with(_schedule_of(tree))


def walk_sections(tree: Node) -> dict[str, tuple[tuple[Path, Node], ...]]:
    """``walk_for`` by the first key; shared, not to be changed."""
    return _sections_with(_schedule_of(tree))


def _schedule_of(tree: Node) -> str | None:
    scheduler = tree.get("scheduler")
    kind = scheduler.get("type") if isinstance(scheduler, dict) else None
    return kind if isinstance(kind, str) and kind in load_schema()["$defs"] else None


@functools.cache
def _walk_with(schedule: str | None) -> tuple[tuple[Path, Node], ...]:
    result: list[tuple[Path, Node]] = []
    for path, node in walk():
        if path == ("scheduler", "params") and schedule is not None:
            params = load_schema()["$defs"][schedule]
            result += [(path, params), *walk(params, path)]
        else:
            result.append((path, node))
    return tuple(result)


@functools.cache
def _sections_with(schedule: str | None) -> dict[str, tuple[tuple[Path, Node], ...]]:
    grouped = itertools.groupby(_walk_with(schedule), lambda each: each[0][0])
    return {key: tuple(nodes) for key, nodes in grouped}


def types_of(node: Node) -> set[str]:
    """The JSON types that a node accepts."""
    kinds = node.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)


@functools.cache
def _by_last_key() -> dict[str, list[Path]]:
    result: dict[str, list[Path]] = {}
    for path, node in walk():
        if not is_other_name(node) and path != ("$schema",):
            result.setdefault(path[-1], []).append(path)
    return result


def _is_section(path: Path) -> bool:
    return any(len(other) > len(path) and other[: len(path)] == path for other, _ in walk())


def foreign_name(key: str) -> str | None:
    """DeepSpeed's name, dotted, for a key that another tool uses."""
    names: dict[str, str] = load_schema()["x-foreign-names"]
    return names.get(key)


def nearest(key: str, parent: Path, siblings: list[str]) -> str:
    """The instruction for an unknown ``key`` inside ``parent``: what was meant, or where it belongs."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    if plain in siblings:
        return f'write "{plain}"'
    if plain.startswith(("_", "//", "#", "comment")):
        return "remove it; comments may be written as // text and /* text */"
    foreign = foreign_name(plain)
    if foreign and not parent:
        return f"DeepSpeed calls it {foreign}"
    if foreign and foreign.rpartition(".")[0] == dotted(parent):
        return f'DeepSpeed calls it "{foreign.rpartition(".")[2]}"'
    elsewhere = [path for path in _by_last_key().get(plain, []) if path[:-1] != parent]
    if parent == ("bf16",) and ("fp16", plain) in elsewhere:
        return "remove it: bf16 has the range of fp32 and needs no loss scale"
    if 1 <= len(elsewhere) <= 3:
        return f"move it to {' or '.join(dotted(path[:-1]) or 'the top level' for path in elsewhere)}, where it belongs"
    close = difflib.get_close_matches(plain, siblings, n=2, cutoff=0.7)
    close += [] if close else [name for name in siblings if name.startswith(f"{plain}_")][:2]  # topk, of topk_ratio
    if close:
        return " or ".join(f'did you mean "{name}"' for name in close[:1]) + (
            f' or "{close[1]}"?' if close[1:] else "?"
        )
    far = [] if elsewhere else difflib.get_close_matches(plain, _by_last_key(), n=1, cutoff=0.8)
    if far and not _is_section(_by_last_key()[far[0]][0]):  # a section inside another one was not meant
        return f"did you mean {dotted(_by_last_key()[far[0]][0])}?"
    return f"remove it; known here: {', '.join(siblings[:12])}{', ...' if len(siblings) > 12 else ''}"
