"""Finds out what ``load_config`` was given and reads it: path, dict, JSON text, base64 or the name of a preset.

Whatever it was, the result is a tree of plain dicts, lists, texts, numbers, booleans and None, with lines where
there was a text. What cannot be such a tree is a ``ConfigError``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import difflib
import itertools
import numbers
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ds_hf.config.parse import MAX_DEPTH, Parsed, parse
from ds_hf.config.presets import PRESETS, preset
from ds_hf.config.schema import Node, escape, pointer_of, walk_sections
from ds_hf.config.schema import Path as Keys
from ds_hf.config.types.root import Origin
from ds_hf.errors import ConfigError, Fault
from ds_hf.regular_files import TEXT_NBYTES, read_regular

__all__ = ["ConfigSource", "Draft", "in_order", "read_source"]

_BASE64_MIN = 8
_MAX_BITS = 1024
_MOST_VALUES = 10**6  # of a dict


@dataclass
class ConfigSource:
    """A configuration as it arrived: its tree, a name for messages, lines, and faults met while reading."""

    name: str
    tree: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def read_source(source: object) -> ConfigSource:
    """Read ``source``, whatever it is."""
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, os.PathLike):
        return _from_file(os.fspath(source))
    if isinstance(source, str):
        return _from_text(source)
    message = f"a {type(source).__name__} is not a configuration"
    raise ConfigError([Fault("", message, "give a path, a dict, JSON text, base64 text or the name of a preset")])


def _from_text(text: str) -> ConfigSource:
    if text in PRESETS and not os.path.isfile(text):
        return ConfigSource(f"preset {text}", preset(text))
    if _is_file(text):
        return _from_file(text)
    stripped = text.lstrip("\ufeff \t\r\n")
    if stripped.startswith(("{", "[", "//", "#", "/*")) or "\n" in stripped:
        return _from_parsed(parse(text, "JSON text"), "JSON text")
    decoded = _base64_text(text)
    if decoded is not None:
        return _from_parsed(parse(decoded, "base64 text"), "base64 text")
    if not stripped:
        raise ConfigError([Fault("", "the configuration is empty", "give a path or JSON text")])
    raise _not_found(text)


def _is_file(text: str) -> bool:
    try:
        return os.path.exists(text)
    except (OSError, ValueError):
        return False


def _base64_text(text: str) -> str | None:
    """The JSON text inside url-safe base64 (also without its padding), or None."""
    if len(text) < _BASE64_MIN:
        return None
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        decoded = raw.decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith(("{", "[", "//", "#", "/*")) else None


def _not_found(text: str) -> ConfigError:
    shown = text if len(text) <= 100 else text[:97] + "..."
    near = difflib.get_close_matches(text, PRESETS, n=1)
    folder = Path(text[:1000]).parent
    with contextlib.suppress(OSError, ValueError):
        near += difflib.get_close_matches(Path(text[:1000]).name, os.listdir(folder), n=2, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    fix = f"{hint}Give the path of a file, JSON text or a preset: {', '.join(PRESETS)}"
    return ConfigError([Fault("", f'there is no file "{shown}"', fix)], shown)


def _from_file(path: str | bytes) -> ConfigSource:
    name = os.fsdecode(path)
    try:
        raw = read_regular(name, TEXT_NBYTES)
    except IsADirectoryError:
        raise ConfigError([Fault("", f'"{name}" is a folder', "give the path of the JSON file in it")], name) from None
    except FileNotFoundError:
        raise _not_found(name) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            [Fault("", f"cannot read the file: {reason}", "check the path and its permissions")], name
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            text = raw.decode("utf-16") if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        except UnicodeDecodeError:
            text = ""
        if not text:
            raise ConfigError([Fault("", "the file is not text", "give a JSON file in UTF-8")], name) from None
    return _from_parsed(parse(text, name), name)


def _from_parsed(parsed: Parsed, name: str) -> ConfigSource:
    if not isinstance(parsed.value, dict):
        kind = {list: "a list", str: "a text", bool: "a boolean", type(None): "null"}.get(
            type(parsed.value), "a number"
        )
        fault = Fault("", f"the file holds {kind}, not an object", "put the settings in { }", parsed.lines.get(""))
        raise ConfigError([*parsed.faults, fault], name)
    return ConfigSource(name, parsed.value, parsed.lines, [*parsed.faults, *_nul_faults(parsed.value, "")])


def _nul_faults(value: Any, pointer: str) -> Iterator[Fault]:
    """Texts with a NUL, which no path and no name has."""
    if isinstance(value, str) and "\0" in value:
        yield Fault(pointer, "the text has a NUL character", "remove it")
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _nul_faults(each, f"{pointer}/{escape(str(key))}")


def _from_mapping(mapping: Mapping[Any, Any]) -> ConfigSource:
    source = ConfigSource("config dict", {})
    tree = _plain(mapping, "", (), source.faults, itertools.count(1))
    if isinstance(tree, dict):
        source.tree = tree
        source.faults += _nul_faults(tree, "")
    return source


def _plain(value: Any, pointer: str, ancestors: tuple[int, ...], faults: list[Fault], visited: Iterator[int]) -> Any:
    """A copy of ``value`` of plain JSON types; what has no such form becomes a fault and None."""
    if id(value) in ancestors:
        faults.append(Fault(pointer, "the value contains itself", "remove the cycle"))
        return None
    count = next(visited)
    if count > _MOST_VALUES:  # a list that holds a list twice, and so on, is small and has hardly an end
        if count == _MOST_VALUES + 1:
            faults.append(Fault(pointer, f"with it there are more than {_MOST_VALUES} values", "shorten it"))
        return None
    if len(ancestors) > MAX_DEPTH:
        faults.append(Fault(pointer, f"nested deeper than {MAX_DEPTH} levels", "no section is nested that deeply"))
        return None
    if type(value) is int and value.bit_length() > _MAX_BITS:
        faults.append(Fault(pointer, "the number is far too large", "no setting needs such a number"))
        return None
    if value is None or type(value) in (bool, int, float, str):
        return value
    inside = (*ancestors, id(value))
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                faults.append(Fault(pointer, f"the key {key!r:.60} is a {type(key).__name__}", "keys are strings"))
                continue
            result[str(key)] = _plain(item, f"{pointer}/{escape(key)}", inside, faults, visited)
        return result
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{pointer}/{index}", inside, faults, visited) for index, item in enumerate(value)]
    return _plain_scalar(value, pointer, faults)


def _plain_scalar(value: Any, pointer: str, faults: list[Fault]) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    faults.append(
        Fault(
            pointer,
            f"a {type(value).__name__} cannot be written as JSON",
            "give a string, number, boolean, list or dict",
        )
    )
    return None


# -- on its way to ``Config`` ------------------------------------------------------------------------------------------

MOST_FAULTS = 50


@dataclass
class Draft:
    """The tree (a copy that may be changed), its lines, faults, warnings, the origins of moved values, and what faults
    are raised as."""

    name: str
    tree: dict[str, Any]
    lines: dict[str, int]
    allow_auto: bool
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    raised: type[ConfigError] = ConfigError

    @classmethod
    def of(cls, source: ConfigSource, allow_auto: bool) -> Draft:
        draft = cls(source.name, copy.deepcopy(source.tree), dict(source.lines), allow_auto)
        for fault in source.faults:
            draft._add(fault)
        return draft

    def line(self, pointer: str) -> int | None:
        """The line of ``pointer``, or of the nearest object around it."""
        while pointer and pointer not in self.lines:
            pointer = pointer.rpartition("/")[0]
        return self.lines.get(pointer)

    def fault(self, pointer: str, message: str, fix: str = "") -> None:
        self._add(Fault(pointer, message, fix, self.line(pointer)))

    def _add(self, fault: Fault) -> None:
        self.faults.append(fault)
        if len(self.faults) >= MOST_FAULTS:
            ended = Fault("", f"the check ended after {MOST_FAULTS} faults", "is this the right file?")
            raise ConfigError([ended, *in_order(self.faults)], self.name)

    def refuse(self) -> NoReturn:
        """Raise what was found."""
        raise self.raised(in_order(self.faults), self.name)

    def warn(self, pointer: str, message: str, fix: str = "") -> None:
        self.warnings.append(Fault(pointer, message, fix, self.line(pointer)))

    def faulty(self, pointer: str) -> bool:
        """Whether a fault was found at ``pointer``, inside it or around it (the top level does not count)."""
        return any(
            fault.pointer == pointer
            or fault.pointer.startswith(pointer + "/")
            or pointer.startswith(fault.pointer + "/")
            for fault in self.faults
            if fault.pointer
        )

    def get(self, path: Keys) -> Any:
        """The value at ``path``, or None when it or a parent is absent."""
        value: Any = self.tree
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value

    def has(self, path: Keys) -> bool:
        """Whether the key at ``path`` is present."""
        parent = self.get(path[:-1])
        return isinstance(parent, dict) and path[-1] in parent

    def present(self) -> Iterator[tuple[Keys, Node]]:
        """``walk_for`` of the keys that are there when they are come to: of most sections none is."""
        for key, nodes in walk_sections(self.tree).items():
            if key in self.tree:
                yield from ((path, node) for path, node in nodes if self.has(path))

    def put(self, path: Keys, value: Any, origin: Origin) -> bool:
        """Set ``path``, making the objects around it; False when a parent is no object."""
        parent = self.tree
        for key in path[:-1]:
            if parent.get(key) is None:
                parent[key] = {}
            parent = parent[key]
            if not isinstance(parent, dict):
                return False
        parent[path[-1]] = value
        pointer = pointer_of(path)
        self.origins[pointer] = origin
        if origin.line is not None:
            self.lines[pointer] = origin.line
        return True

    def drop(self, path: Keys) -> None:
        """Remove the key at ``path``, if it is there."""
        parent = self.get(path[:-1])
        if isinstance(parent, dict):
            parent.pop(path[-1], None)

    def without_faults(self) -> dict[str, Any]:
        """The tree less every value that has a fault, so that later steps see legal values only."""
        bad = {fault.pointer for fault in self.faults if fault.pointer}
        return _pruned(self.tree, "", bad)


def in_order(faults: list[Fault]) -> list[Fault]:
    """Without repetitions, in file order; a dict has no lines and keeps the order of the checks."""
    unique = list(dict.fromkeys(faults))
    return sorted(unique, key=lambda fault: fault.line or 0)


def _pruned(tree: dict[str, Any], pointer: str, bad: set[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        here = f"{pointer}/{escape(key)}"
        if here in bad:
            continue
        result[key] = _pruned(value, here, bad) if isinstance(value, dict) else value
        if isinstance(value, list) and any(pointer.startswith(here + "/") for pointer in bad):
            del result[key]
    return result
