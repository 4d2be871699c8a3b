"""The lenient JSON parser: what it accepts, and the line of every value."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hf.config.parse import parse
from ds_hf.config.schema import escape
from ds_hf.errors import ConfigError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, "b": [1, 2,], }', {"a": 1, "b": [1, 2]}),
        ("{a: 1\n b: 2}", {"a": 1, "b": 2}),
        ("{'a': 'x\"y'}", {"a": 'x"y'}),
        ("{// one\n a: 1 # two\n /* three */ b: 2}", {"a": 1, "b": 2}),
        ("{path: /local/nvme\n device: cpu // fast\n}", {"path": "/local/nvme", "device": "cpu"}),
        ("{url: http://x/y}", {"url": "http://x/y"}),
        ("{a: '''\ntwo\nlines\n'''}", {"a": "two\nlines"}),
        ('{"a": 5e8, "b": -1.5E-3, "c": -0}', {"a": 5e8, "b": -1.5e-3, "c": 0}),
        ('{"a": Infinity, "b": -Infinity}', {"a": math.inf, "b": -math.inf}),
        ('{"a": "\\u00e9\\ud83d\\ude00\\n"}', {"a": "é😀\n"}),
        ("\ufeff{}", {}),
    ],
)
def test_accepts_what_hjson_accepts(text: str, value: object) -> None:
    assert parse(text).value == value


def test_a_lone_half_of_a_pair_becomes_printable() -> None:
    assert parse('{"a": "\\ud800"}').value["a"].encode("utf-8")


def test_lines_and_pointers() -> None:
    parsed = parse('{\n  "a": {\n    "b/c": 1,\n    "d": [\n      1,\n      2]\n  },\n  "e~": 3}')
    assert parsed.lines == {"": 1, "/a": 2, "/a/b~1c": 3, "/a/d": 4, "/a/d/0": 5, "/a/d/1": 6, "/e~0": 8}
    assert escape("a~/b") == "a~0~1b"


def test_every_duplicate_is_reported() -> None:
    parsed = parse('{"a": 1,\n"a": 2,\n"b": {"c": 1,\n"c": 1}}')
    assert [(fault.pointer, fault.line) for fault in parsed.faults] == [("/a", 2), ("/b/c", 4)]
    assert parsed.value == {"a": 2, "b": {"c": 1}}


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_reads_any_json_as_json_does(value: object) -> None:
    assert parse(json.dumps(value)).value == value
    assert parse(json.dumps(value, indent=2, ensure_ascii=False)).value == value


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}[]:,\"'\\/*#\n \tab1-.eE+trufalsn", max_size=60))
def test_raises_nothing_but_config_errors(text: str) -> None:
    message = "fine"
    try:
        parse(text)
    except ConfigError as error:
        message = error.faults[0].message
    assert message
