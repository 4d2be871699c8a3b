"""Whatever comes in, out comes a ``Config`` or a ``ConfigError`` whose faults name a place: nothing else, ever."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hf.config import Config, ConfigError, load_config
from ds_hf.config.presets import PRESETS
from ds_hf.config.schema import Path, load_schema, walk

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["auto", "8", "1e-4", "true", "cpu", "nvme", "none", "inf", "fp32", "AdamW", "SGD", "OneCycle", "WarmupLR"]
    ),
)
ANY = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=8
)
PATHS = [path for path, _ in walk()]
PATHS += [path for node in load_schema()["$defs"].values() for path, _ in walk(node, ("scheduler", "params"))]


def attempt(source: Any, **kwargs: Any) -> None:
    config: Config | None = None
    error: ConfigError | None = None
    try:
        config = load_config(source, **kwargs)
    except ConfigError as caught:
        error = caught
    if error is not None:
        assert error.faults
        assert all(fault.message for fault in error.faults)
        assert all(fault.pointer == "" or fault.pointer.startswith("/") for fault in error.faults)
        assert str(error)
        return
    assert config is not None
    assert config == load_config(source, **kwargs)
    # What was accepted and completed is accepted again as it is.
    again = load_config(config.resolved, **kwargs)
    assert again.resolved == config.resolved


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[path[-1]] = value


@pytest.mark.parametrize("value", [None, True, 2, -0.5, "x", [1], {"x": 1}], ids=repr)
def test_a_value_of_each_type_at_every_key(value: Any) -> None:
    for path in PATHS:
        tree: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
        put(tree, path, value)
        try:
            attempt(tree, world_size=2)
        except Exception as error:
            raise AssertionError(path) from error


CHANGES = st.lists(st.tuples(st.sampled_from(PATHS), ANY), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHANGES, st.booleans())
def test_any_value_at_any_key(changes: list[tuple[Path, Any]], allow_auto: bool) -> None:
    attempt_changed(changes, allow_auto)


@pytest.mark.slow  # others each time; those above are the same in each run
@settings(max_examples=1000, derandomize=False, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHANGES, st.booleans())
def test_further_values_at_any_key(changes: list[tuple[Path, Any]], allow_auto: bool) -> None:
    attempt_changed(changes, allow_auto)


def attempt_changed(changes: list[tuple[Path, Any]], allow_auto: bool) -> None:
    tree: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    for path, value in changes:
        put(tree, path, copy.deepcopy(value))
    attempt(tree, world_size=2, allow_auto=allow_auto)


@settings(max_examples=150, deadline=None)
@given(ANY)
def test_any_object(source: Any) -> None:
    attempt(source, world_size=1)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.data())
def test_a_preset_with_damaged_text(name: str, data: st.DataObject) -> None:
    from ds_hf.config.presets import preset

    text = json.dumps(preset(name), indent=1)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 6)))
    damage = data.draw(st.text(alphabet='{}[]:,"\\/*# \n0a.-', max_size=3))
    attempt("{" + text[:start][1:] + damage + text[end:], world_size=1, allow_auto=True)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_file(tmp_path_factory: Any, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "ds.json"
    path.write_bytes(raw)
    attempt(path, world_size=1)
