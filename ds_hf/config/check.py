"""Checks a draft against the schema and turns what jsonschema finds into faults for people.

jsonschema applies the rules; this module adds what was meant: the nearest key, the place where a key belongs, the
legal values. "auto" is settled first, because only the keys that the Trainer fills may hold it.

``check_status`` says what becomes of settings that ds_hf knows and does not act upon.

A setting that changes the training and is not implemented is a fault (``x-status: unsupported``); one that only
tunes or reports is a warning with its reason (``no-effect``). Both only when it is switched on: not at its default,
or as ``x-on`` says. A block that carries a status speaks for everything inside it.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from ds_hf.config.draft import Draft
from ds_hf.config.presets import preset_like
from ds_hf.config.schema import Node, Path, dotted, escape, holds, load_schema, nearest, pointer_of, types_of, walk_for

__all__ = ["check", "check_against", "check_status", "show"]

_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object { }",
    "null": "null",
}


def show(value: Any, limit: int = 60) -> str:
    """A value as it stands in JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check(draft: Draft) -> None:
    """Collect every way in which ``draft.tree`` is not what the schema describes."""
    _check_auto(draft)
    for error in _validator().iter_errors(draft.tree):
        _translate(error, draft)


def check_against(draft: Draft, schema: Node) -> None:
    """The same by another schema, without "auto": values, and what becomes of them."""
    for error in Draft202012Validator(schema).iter_errors(draft.tree):
        _translate(error, draft)
    _object(draft, schema, draft.without_faults(), ())


@functools.cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(load_schema())


def _check_auto(draft: Draft) -> None:
    nodes = {pointer_of(path): node for path, node in walk_for(draft.tree)}
    offered = ""
    for pointer in _autos(draft.tree, ""):
        node = nodes.get(pointer, {})
        fills = node.get("x-auto")
        kinds = types_of(node)
        if fills == "literal" or ("string" in kinds and "pattern" not in node and "enum" not in node and not fills):
            continue
        if fills is None:
            if node:
                what = (
                    f"set a value or remove it (default {show(node.get('default'))})"
                    if "default" in node
                    else "give a value"
                )
                draft.fault(pointer, '"auto" is not filled in here by the Trainer or accelerate', what)
        elif not draft.allow_auto and fills["source"] != "the model":
            # Sizes that follow from the model keep their defaults, as in DeepSpeed: TRL's reference models come so.
            message = '"auto" was not filled in: the Trainer and accelerate do that, a plain initialize() does not'
            by_accelerate = fills["source"] == "accelerate"
            who = "accelerate" if by_accelerate else f"the Trainer (it takes {fills['source']})"
            if not offered:  # once a file, however many there are
                offered = (
                    f"\n           for your own loop: ds-hf config new --for loop --preset {preset_like(draft.tree)}"
                )
                who += offered
            draft.fault(pointer, message, f"give a value, or run under {who}")


def _autos(value: Any, pointer: str) -> list[str]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _autos(item, f"{pointer}/{escape(key)}")]
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in _autos(item, f"{pointer}/{index}")]
    return [pointer] if value == "auto" and isinstance(value, str) else []


def _translate(error: ValidationError, draft: Draft) -> None:
    path: Path = tuple(str(part) for part in error.absolute_path)
    pointer = pointer_of(path)
    if error.validator == "additionalProperties":
        _unknown_keys(error, path, draft)
        return
    if error.validator == "required":
        for key in error.validator_value:
            here = pointer_of((*path, key))
            if key not in error.instance and not any(fault.pointer == here for fault in draft.faults):
                parent = dotted(path) or "the configuration"
                draft.fault(
                    here, f'"{key}" is missing; {parent} needs it', f'add "{key}": {_example(error.schema, key)}'
                )
        return
    if any(fault.pointer == pointer for fault in draft.faults):
        return
    message, fix = _wrong_value(error)
    draft.fault(pointer, message, fix)


def _example(schema: Any, key: str) -> str:
    node: Node = schema.get("properties", {}).get(key, {}) if isinstance(schema, dict) else {}
    if "$ref" in node:
        needed = load_schema()["$defs"][node["$ref"].rpartition("/")[2]]["required"]
        return "{" + ", ".join(f'"{name}": ...' for name in needed) + "}"
    if node.get("enum"):
        return " or ".join(show(choice) for choice in node["enum"])
    kinds = types_of(node)
    return show(node["examples"][0]) if node.get("examples") else "{...}" if "object" in kinds else "..."


def _unknown_keys(error: ValidationError, path: Path, draft: Draft) -> None:
    known = error.schema.get("properties", {})
    siblings = [key for key, node in known.items() if not node.get("deprecated") and key != "$schema"]
    for key in error.instance:
        if key in known:
            continue
        here = pointer_of((*path, key))
        if not any(fault.pointer == here for fault in draft.faults):
            place = f"in {dotted(path)}" if path else "at the top level"
            shown = key if len(key) <= 60 else key[:57] + "..."
            draft.fault(here, f'unknown key "{shown}" {place}', nearest(key[:200], path, siblings))


def _wrong_value(error: ValidationError) -> tuple[str, str]:
    value, node = error.instance, error.schema if isinstance(error.schema, dict) else {}
    shown = show(value)
    limit = error.validator_value
    if error.validator == "enum" or (error.validator in ("type", "pattern") and node.get("enum")):
        return _wrong_choice(value, node)
    if error.validator in ("type", "pattern"):
        return _wrong_type(value, node)
    bounds = {
        "minimum": ("is too small", f"give at least {limit}"),
        "exclusiveMinimum": ("is too small", f"give more than {limit}"),
        "maximum": ("is too large", f"give at most {limit}"),
        "exclusiveMaximum": ("is too large", f"give less than {limit}"),
        "minItems": (
            "has too few elements",
            f"give {limit}" if node.get("maxItems") == limit else f"give {limit} or more",
        ),
        "maxItems": ("has too many elements", f"give {limit}"),
    }
    what, fix = bounds.get(str(error.validator), ("is not allowed here", error.message))
    return f"{shown} {what}", fix


def _wrong_choice(value: Any, node: Node) -> tuple[str, str]:
    choices = [show(choice) for choice in node["enum"]]
    words = [choice for choice in node["enum"] if isinstance(choice, str)]  # 16 is not like 1
    near = difflib.get_close_matches(str(value)[:100], words, n=1, cutoff=0.6)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f"{show(value)} is not a choice here", f"{hint}choose {', '.join(choices[:-1])} or {choices[-1]}"


def _wrong_type(value: Any, node: Node) -> tuple[str, str]:
    kinds = types_of(node) - ({"string"} if node.get("pattern") else set())
    wanted = [name for kind, name in _KINDS.items() if kind in kinds and kind != "null"] or ["null"]
    takes_auto = node.get("x-auto") not in (None, "literal") or node.get("pattern") == "^auto$"
    expected = " or ".join(wanted) + (' or "auto"' if takes_auto else "")
    default = f" (default {show(node['default'])})" if "default" in node else ""
    if isinstance(value, bool):
        found = f"{show(value)} is a boolean"
    elif isinstance(value, str):
        found = f"{show(value)} is a string"
    elif value is None:
        return f"null is not a value here; expected {expected}", f"remove it{default}, or give a value"
    elif isinstance(value, (dict, list)):
        found = "an object" if isinstance(value, dict) else "a list"
        found += " stands here"
    else:
        fraction = isinstance(value, float) and not value.is_integer()
        found = f"{show(value)} is a number" + (" with a fraction" if fraction else "")
    fix = f"give {expected}"
    if isinstance(value, str) and re.fullmatch(r"(?i)yes|no|on|off|enabled|disabled", value) and "boolean" in kinds:
        fix = "write true or false"
    return f"{found}; expected {expected}", fix + default


# -- keys without effect -----------------------------------------------------------------------------------------------


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
