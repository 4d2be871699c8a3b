"""The dataclasses and the schema agree: names, defaults and statuses, in both directions."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_hf.config import Config
from ds_hf.config.load import _section_class
from ds_hf.config.schema import Node, dotted, is_other_name, load_schema, types_of, walk

UNREAD = {
    *("datastates_ckpt", "eigenvalue"),
}
OWN_FIELDS = {"source", "mesh", "resolved", "provenance", "warnings"}
DICTS = {("optimizer", "params"), ("scheduler", "params")}


def pairs(
    cls: type[Any], node: Node, path: tuple[str, ...] = ()
) -> typing.Iterator[tuple[tuple[str, ...], type[Any], Node]]:
    yield path, cls, node
    for field_name, hint in typing.get_type_hints(cls).items():
        section = _section_class(hint)
        if section is not None and field_name not in OWN_FIELDS:
            yield from pairs(section, node["properties"][field_name], (*path, field_name))


def plain(value: Any) -> Any:
    return [plain(item) for item in value] if isinstance(value, tuple) else value


SECTIONS = list(pairs(Config, load_schema()))


@pytest.mark.parametrize(("path", "cls", "node"), SECTIONS, ids=[dotted(path) or "Config" for path, _, _ in SECTIONS])
def test_names_and_defaults_agree(path: tuple[str, ...], cls: type[Any], node: Node) -> None:
    found = [field for field in dataclasses.fields(cls) if path or field.name not in OWN_FIELDS]
    fields = {field.name.removesuffix("_"): field for field in found}
    keys = {key: child for key, child in node["properties"].items() if not is_other_name(child) and key != "$schema"}
    unread = [] if path else [key for key in keys if key not in fields]
    wanted = [key for key in keys if key not in unread]
    apart = sorted(set(wanted) ^ set(fields)) or "only the order differs"
    assert list(fields) == wanted, f"{cls.__module__}.{cls.__name__} has a field for each key of the schema: {apart}"
    assert set(unread) == (set() if path else UNREAD), "a section has a class when something reads it"
    hints = typing.get_type_hints(cls)
    for key, child in keys.items():
        if key in unread:
            assert child["x-status"] in ("unsupported", "no-effect")
            continue
        if _section_class(hints[fields[key].name]) is not None:
            default = fields[key].default
            absent = default is None and (child.get("default", ...) is None or key in ("optimizer", "scheduler"))
            assert absent or fields[key].default_factory is _section_class(hints[fields[key].name])
        elif key == "type" and path in (("optimizer",), ("scheduler",)):
            assert fields[key].default is dataclasses.MISSING
            assert "type" in node["required"]
        elif fields[key].default is dataclasses.MISSING:
            assert fields[key].default_factory is dict
            assert child.get("default", {}) == {}
        else:
            assert plain(fields[key].default) == child["default"]


def test_all_sections_are_frozen() -> None:
    assert all(cls.__dataclass_params__.frozen for _, cls, _ in SECTIONS)
    assert len(SECTIONS) > 30


def test_every_key_is_described_and_has_a_status() -> None:
    seen = 0
    roots: list[tuple[Node, tuple[str, ...]]] = [(load_schema(), ())]
    roots += [(node, ("scheduler", "params")) for node in load_schema()["$defs"].values()]
    for root, base in roots:
        statuses: dict[tuple[str, ...], str] = {base: root.get("x-status", "")}
        for path, node in walk(root, base):
            seen += 1
            name = dotted(path)
            assert node.get("title"), name
            assert node["description"].endswith("."), name
            status = node.get("x-status") or statuses.get(path[:-1], "")
            statuses[path] = status
            if node.get("deprecated"):
                assert node.get("x-renamed-to") or node.get("x-convert") == "drop", name
                continue
            if "properties" not in node or "x-status" in node:
                assert status in ("implemented", "no-effect", "unsupported"), name
            if node.get("x-status") in ("no-effect", "unsupported"):
                assert node.get("x-reason"), name
            if "default" in node and node["default"] is not None:
                assert Draft202012Validator(node).is_valid(node["default"]), name
    assert seen > 400


def test_targets_of_older_names_exist() -> None:
    paths = {path for path, _ in walk()}
    for name, node in load_schema()["$defs"].items():
        paths |= {path for path, _ in walk(node, ("scheduler", "params"))}
        assert name[0].isupper()
    targets = [node["x-renamed-to"] for _, node in walk() if "x-renamed-to" in node]
    assert len(targets) > 20
    assert all(tuple(target[1:].split("/")) in paths for target in targets)
    foreign = load_schema()["x-foreign-names"].values()
    assert all(tuple(name.split(".")) in paths for name in foreign)


def test_the_schema_is_valid_and_closed() -> None:
    Draft202012Validator.check_schema(load_schema())
    opened = {dotted(path) for path, node in walk() if node.get("additionalProperties") is True}
    assert opened == {
        "optimizer.params",
        "scheduler.params",
        "amp",
        "bfloat16",
        "comms_config",
        "monitor_config",
        "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config",
        "curriculum_learning.schedule_config",
        "quantize_training",
        "weight_quantization.quantized_initialization",
        "weight_quantization.post_init_quant",
        "autotuning.arg_mappings",
    }
    for path, node in walk():
        if "object" in types_of(node):
            assert "additionalProperties" in node, dotted(path)
