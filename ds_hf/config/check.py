"""Brings a draft to the form that the schema asks for, and checks it: what jsonschema finds becomes faults for people.

jsonschema applies the rules; this module adds what was meant: the nearest key, the place where a key belongs, the
legal values. "auto" is settled first, because only the keys that the Trainer fills may hold it.

``check_status`` says what becomes of settings that ds_hf knows and does not act upon.

A setting that changes the training and is not implemented is a fault (``x-status: unsupported``); one that only
tunes or reports is a warning with its reason (``no-effect``). Both only when it is switched on: not at its default,
or as ``x-on`` says. A block that carries a status speaks for everything inside it.

``normalise`` brings values to that form where there is no doubt about what was meant. Numbers and booleans given as
texts (command lines do that) are converted with one warning; ``5e8`` where an integer is expected, other letter case of
a fixed word, and DeepSpeed's synonyms of a number format are converted silently.

``rename`` moves older spellings to today's keys, with one warning each: the configurations of 2020 keep working.

The schema says where a key went (``x-renamed-to``) and how its value changes (``x-convert``); a block given as a
plain boolean is spelt out (``x-shorthand``). An older key beside its replacement is a fault. DeepSpeed's models take a
field by its own name as well as by its alias: a second name (``x-alias-of``) needs no warning, and is a fault only
beside another value. Top-level keys with dots, which trl writes, and comments are taken out: DeepSpeed ignores both.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from ds_hf.config.presets import preset_like
from ds_hf.config.schema import (
    Node,
    Path,
    dotted,
    escape,
    holds,
    is_other_name,
    load_schema,
    nearest,
    pointer_of,
    types_of,
    walk_for,
)
from ds_hf.config.source import Draft
from ds_hf.config.types.root import Origin, OriginKind

__all__ = ["check", "check_against", "check_status", "normalise", "rename", "show"]

_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object { }",
    "null": "null",
}


# What the Trainer reports to, and no section of DeepSpeed's files.
_TRACKERS = ("aim", "clearml", "codecarbon", "dagshub", "dvclive", "flyte", "mlflow", "neptune", "swanlab", "trackio")


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


NOT_CHOSEN = ("the model", "the default")  # the sources of an "auto" size that no client fills in


def _check_auto(draft: Draft) -> None:
    autos = _autos(draft.tree, "")
    nodes = {pointer_of(path): node for path, node in walk_for(draft.tree)} if autos else {}
    offered = ""
    for pointer in autos:
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
        elif not draft.allow_auto and fills["source"] not in NOT_CHOSEN:
            # Sizes keep their defaults, as in DeepSpeed: TRL's reference models and OpenRLHF's engines come so.
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
    siblings = [key for key, node in known.items() if not is_other_name(node) and key != "$schema"]
    for key in error.instance:
        if key in known:
            continue
        here = pointer_of((*path, key))
        if not any(fault.pointer == here for fault in draft.faults):
            place = f"in {dotted(path)}" if path else "at the top level"
            shown = key if len(key) <= 60 else key[:57] + "..."
            tracked = not path and key.lower() in _TRACKERS
            fix = f"remove it; the Trainer writes there: --report_to {key.lower()}" if tracked else ""
            draft.fault(here, f'unknown key "{shown}" {place}', fix or nearest(key[:200], path, siblings))


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
        if child is None or is_other_name(child):
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


# -- the form that the schema asks for --------------------------------------------------------------------------------

_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]{1,40}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?\s*")
_INFINITE = {"inf", "infinity", "+inf"}
_LARGEST = 2**63 - 1


def normalise(draft: Draft) -> None:
    """Convert what can be converted in ``draft.tree``."""
    texts: list[str] = []
    for path, node in draft.present():
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
            more = " (0 clips nothing)" if pointer == "/gradient_clipping" else ""
            draft.fault(pointer, f"{value} is not a usable number", "give a finite number" + more)
    elif isinstance(value, int) and abs(value) > _LARGEST:
        draft.fault(pointer, "the number does not fit into 64 bits", "give a smaller one")


# -- older keys --------------------------------------------------------------------------------------------------------


_SKIP = object()


def rename(draft: Draft) -> None:
    """Bring ``draft.tree`` to today's spelling."""
    _drop_dotted(draft)
    _drop_comments(draft, draft.tree, load_schema(), ())
    _shorthands(draft)
    for path, node in draft.present():
        if not is_other_name(node):
            continue
        if "x-alias-of" in node:
            _join(draft, path, node)
        elif node.get("x-convert") == "drop":
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


def _drop_comments(draft: Draft, tree: dict[str, Any], node: Node, path: Path) -> None:
    """Keys that are there for people, as clients' own files have them: ``"_comment": "..."``."""
    known = node.get("properties", {})
    for key in [key for key in tree if key not in known and re.match(r"_|//|#|comments?$", key)]:
        draft.warn(pointer_of((*path, key)), "ignored: taken for a comment", "write comments as // text")
        del tree[key]
    for key, value in tree.items():
        child = known.get(key, {})
        if isinstance(value, dict) and child.get("additionalProperties") is False:
            _drop_comments(draft, value, child, (*path, key))


def _shorthands(draft: Draft) -> None:
    """Spell out blocks that are given as one boolean."""
    own = draft.tree.get("ds_hf")
    for key in ("fp8", "qat"):
        if isinstance(own, dict) and isinstance(own.get(key), bool):
            own[key] = {"enabled": own[key]}
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
    if converted is _SKIP:  # off says nothing, beside the newer name as well
        draft.drop(path)
        if value is not None:
            draft.warn(pointer, f"older form of {dotted(target)}, and switched off", "remove it")
        return
    if draft.has(target) and node.get("x-convert") != "pin-memory":
        draft.fault(
            pointer, f"{dotted(path)} is the older name of {dotted(target)}, and both are set", f'remove "{path[-1]}"'
        )
        draft.drop(path)
        return
    draft.drop(path)
    draft.warn(pointer, f"older name of {dotted(target)}, and taken as that")
    origin = Origin(OriginKind.RENAMED, dotted(path), line)
    targets = [target]
    if node.get("x-convert") == "pin-memory":
        blocks = [("zero_optimization", name) for name in ("offload_optimizer", "offload_param")]
        targets = [(*block, "pin_memory") for block in blocks if isinstance(draft.get(block), dict)]
    for one in targets:
        if not draft.put(one, converted, origin):
            draft.fault(pointer, f"cannot move it to {dotted(one)}, which is not an object", f"use {dotted(one)}")


def _join(draft: Draft, path: Path, node: Node) -> None:
    """The value of a key by its second name, which is as good as the first, to the first."""
    value, target = draft.get(path), (*path[:-1], node["x-alias-of"])
    if not _right_type(value, node):
        return
    if draft.has(target) and draft.get(target) != value:
        message = f"{dotted(path)} and {target[-1]} are two names of one setting, and say {show(value)} and"
        draft.fault(pointer_of(path), f"{message} {show(draft.get(target))}", "keep one of the two")
    elif not draft.has(target):
        draft.put(target, value, Origin(OriginKind.USER, path[-1], draft.line(pointer_of(path))))
    draft.drop(path)


def _right_type(value: Any, node: Node) -> bool:
    bare: Node = {
        key: node[key] for key in ("type", "pattern", "minimum", "exclusiveMinimum", "maximum") if key in node
    }
    return value is None or holds(bare, value)


def _same(value: Any, draft: Draft) -> Any:
    return _SKIP if value is None else value


def _cpu_device(value: Any, draft: Draft) -> Any:
    return {"device": "cpu"} if value is True else _SKIP


def _fp32_if_true(value: Any, draft: Draft) -> Any:
    return "fp32" if value is True else _SKIP


def _moq(value: Any, draft: Draft) -> Any:
    from ds_hf.config.compression import from_moq  # few files have the section

    section = None if value is None else from_moq(value, draft)
    return _SKIP if section is None else section


_CONVERTERS: dict[str, Callable[[Any, Draft], Any]] = {
    "same": _same,
    "cpu-device": _cpu_device,
    "fp32-if-true": _fp32_if_true,
    "pin-memory": _same,
    "moq": _moq,
}
