"""A configuration on its way from the source to ``Config``: the tree, and everything found out about it so far.

Each step of ``load.py`` reads and changes the draft. Faults are collected, and raised by the last step; a pointer that
has a fault already gets no second one for the same reason. Only with ``MOST_FAULTS`` the check ends before: what has so
many is not a configuration, and to look for the nearest key takes milliseconds a key.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ds_hf.config.schema import Path, escape, pointer_of
from ds_hf.config.source import Source
from ds_hf.config.types.root import Origin
from ds_hf.errors import ConfigError, Fault

__all__ = ["Draft", "in_order"]

MOST_FAULTS = 50


@dataclass
class Draft:
    """The tree (a copy that may be changed), its lines, faults, warnings and the origins of moved values."""

    name: str
    tree: dict[str, Any]
    lines: dict[str, int]
    allow_auto: bool
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source, allow_auto: bool) -> Draft:
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
        raise ConfigError(in_order(self.faults), self.name)

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

    def get(self, path: Path) -> Any:
        """The value at ``path``, or None when it or a parent is absent."""
        value: Any = self.tree
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value

    def has(self, path: Path) -> bool:
        """Whether the key at ``path`` is present."""
        parent = self.get(path[:-1])
        return isinstance(parent, dict) and path[-1] in parent

    def put(self, path: Path, value: Any, origin: Origin) -> bool:
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

    def drop(self, path: Path) -> None:
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
