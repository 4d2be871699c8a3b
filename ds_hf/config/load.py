"""``load_config``: from anything a user may give to a frozen ``Config``, or one ``ConfigError`` with all faults.

The order matters: values are brought to their plain form before older keys move, keys move before the schema is
applied, and rules across keys see only values that are legal by themselves.

``build`` makes the frozen ``Config`` of a tree that passed the schema. A key that is a keyword of Python (``async``)
has a field with an underscore after it. "auto" that is still there counts as absent: the default applies, and
``provenance`` says who fills it in. ``log_warnings`` puts warnings into one log message, grouped by reason.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from ds_hf.config.check import check, check_status, normalise, rename
from ds_hf.config.mesh import Claim, MeshShape, find_mesh
from ds_hf.config.rules import check_optimizer, check_rules
from ds_hf.config.schema import Node, is_other_name, load_schema, pointer_of, types_of, walk_sections
from ds_hf.config.source import Draft, in_order, read_source
from ds_hf.config.triple import WorldSize, resolve_batch
from ds_hf.config.types.root import Config, Origin, OriginKind
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import log_once

__all__ = ["build", "examine", "grouped", "load_config", "log_warnings", "provenance"]


_IMPLYING = {"compile", "nebula"}
_DEFAULT = Origin(OriginKind.DEFAULT)


def load_config(
    source: object,
    *,
    world_size: int | None = None,
    allow_auto: bool = False,
    check_batch: bool = True,
    given: Sequence[Claim] = (),
) -> Config:
    """Read, check and complete a DeepSpeed configuration.

    Args:
        source: path, dict, JSON text, url-safe base64 of JSON text, or the name of a preset.
        world_size: processes; found from torch.distributed or the launcher when None. Unless the file or ``given``
            says otherwise, all of them are data-parallel.
        allow_auto: "auto" may stay on the keys that the Trainer fills, and counts as the default.
        check_batch: complete and check the batch triple and the mesh of processes. Without it only ``elasticity``
            fills in the triple, if the number of processes is given or a launcher has said it.
        given: sizes of the mesh that are said elsewhere, see ``mesh.given_claims``.

    Raises:
        ConfigError: with every fault found.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ConfigError(
            [Fault("", f"world_size {world_size!r} is not possible", "give the number of processes")], "argument"
        )
    world = WorldSize.find(world_size) if check_batch else None
    launched = WorldSize.launched() if check_batch or world_size is None else WorldSize.find(world_size)
    config = examine(source, world=world, allow_auto=allow_auto, given=given, launched=launched)
    log_warnings(config)
    return config


def examine(
    source: object,
    *,
    world: WorldSize | None,
    allow_auto: bool,
    given: Sequence[Claim] = (),
    launched: WorldSize | None = None,
) -> Config:
    """``load_config`` without the log; ``world`` None skips the batch triple and the mesh, and elasticity goes by
    ``launched``."""
    draft = Draft.of(read_source(source), allow_auto)
    normalise(draft)
    rename(draft)
    normalise(draft)
    check(draft)
    if not _IMPLYING.isdisjoint(draft.tree):
        from ds_hf.config.implied import imply  # few files have such sections

        imply(draft)
    legal = draft.without_faults()
    typed = build(legal, draft.name)
    check_rules(typed, draft)
    check_optimizer(typed, draft)
    check_status(draft, legal)
    mesh = None
    if world is not None:
        mesh = _mesh(typed, draft, world, given)
    if typed.elasticity.enabled:
        _resolve_elastic(typed, draft, world or launched, mesh)
    elif world is not None:
        resolve_batch(draft, legal, world.divided(mesh))
    if draft.faults:
        draft.refuse()
    return dataclasses.replace(
        build(draft.tree, draft.name),
        mesh=mesh,
        resolved=copy.deepcopy(draft.tree),
        provenance=provenance(draft),
        warnings=tuple(in_order(draft.warnings)),
    )


def _resolve_elastic(config: Config, draft: Draft, world: WorldSize | None, mesh: MeshShape | None) -> None:
    """The batch that elasticity chooses, also where transformers takes a configuration before it is complete."""
    from ds_hf.config.elastic_keys import resolve_elastic  # few files have the section

    world = world or WorldSize(0, "unknown")
    if mesh is None and world.value:
        shape, faults = find_mesh(config, world.value, ())
        mesh = None if faults else shape
    resolve_elastic(config, draft, world, mesh)


def _mesh(config: Config, draft: Draft, world: WorldSize, given: Sequence[Claim]) -> MeshShape | None:
    """The mesh, ``None`` where it has faults (which the draft collects) or the number of processes is unknown."""
    shape, faults = find_mesh(config, world.value, given)
    for fault in faults:
        if not (fault.pointer.startswith("/") and draft.faulty(fault.pointer)):  # a refused key needs no second reason
            draft.fault(fault.pointer, fault.message, fault.fix)
    return shape if world.value and not faults else None


# -- from a tree to a Config -------------------------------------------------------------------------------------------


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
    for key, nodes in walk_sections(draft.tree).items():
        if key not in draft.tree:  # as most
            result |= _defaults_of(key)
            continue
        for path, node in nodes:
            if is_other_name(node) or key == "$schema" or ("properties" in node and draft.get(path) != {}):
                continue
            parent = draft.get(path[:-1])
            pointer = pointer_of(path)
            if isinstance(parent, dict) and path[-1] in parent:
                result[pointer] = _origin(draft, pointer, parent[path[-1]], node)
            elif "default" in node and _applies(draft, path):
                result[pointer] = _DEFAULT
    return result


@functools.cache
def _defaults_of(key: str) -> dict[str, Origin]:
    """What is in force of a section that is not there; an optimizer or schedule that is not there has no defaults."""
    if key in ("optimizer", "scheduler", "$schema"):
        return {}
    nodes = [(path, node) for path, node in walk_sections({})[key] if not is_other_name(node)]
    return {pointer_of(path): _DEFAULT for path, node in nodes if "default" in node and "properties" not in node}


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


# -- warnings ----------------------------------------------------------------------------------------------------------


_NO_EFFECT = "no effect: "


def grouped(warnings: tuple[Fault, ...]) -> list[tuple[str, list[Fault]]]:
    """Warnings with the same text together, in order of first appearance."""
    groups: dict[str, list[Fault]] = {}
    for warning in warnings:
        groups.setdefault(warning.message, []).append(warning)
    return list(groups.items())


def log_warnings(config: Config) -> None:
    """Log the warnings of ``config``: one message, once for each content, on rank 0.

    Sizes that the Trainer fills in from the model are logged as information: they were not chosen.
    """
    chosen = tuple(w for w in config.warnings if not (w.message.startswith(_NO_EFFECT) and _from_model(w.pointer)))
    _log(config, chosen, logging.WARNING)
    _log(config, tuple(w for w in config.warnings if w not in chosen), logging.INFO)


def _from_model(pointer: str) -> bool:
    node = load_schema()
    for key in pointer[1:].split("/"):
        node = node.get("properties", {}).get(key, {})
    auto = node.get("x-auto")
    return isinstance(auto, dict) and auto.get("source") == "the model"  # not a choice that is called "auto"


def _log(config: Config, warnings: tuple[Fault, ...], level: int) -> None:
    if not warnings:
        return
    lines = []
    for message, faults in grouped(warnings):
        names = ", ".join(fault.place[1:].replace("/", ".") for fault in faults)
        fix = f" ({faults[0].fix})" if faults[0].fix and len(faults) == 1 else ""
        lines.append(f"  {names}: {message}{fix}")
    log_once(f"{config.source}: {len(warnings)} setting(s) to look at\n" + "\n".join(lines), level)
