"""Values of scripts go into files that are read without running code, and come back with type and value."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import logging
import random
import threading
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from ds_hf.checkpoint.plain import encode, restore
from ds_hf.checkpoint.trust.pickled import check_archive
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import config, engine_of


class Mode(str, enum.Enum):
    FAST = "fast"


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass
class Progress:
    epoch: int
    scores: list[float]
    root: Path

    def __post_init__(self) -> None:
        raise AssertionError("code of the class runs")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int


Pair = namedtuple("Pair", "left right")


def _progress() -> Progress:
    made = object.__new__(Progress)
    made.__dict__.update(epoch=1, scores=[0.5], root=Path("x"), more=np.int64(2))
    return made


def through_a_file(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(encode(value, "client_state", strict=True), stream)
    check_archive(stream, len(stream.getvalue()), sums=True)
    stream.seek(0)
    return restore(torch.load(stream, weights_only=True), "client_state")


VALUES = [
    argparse.Namespace(lr=1e-3, out=Path("runs"), nested=argparse.Namespace(x=1)),
    types.SimpleNamespace(a=np.float32(2)),
    np.float64(0.5), np.int64(-3), np.bool_(True), np.str_("x"), np.datetime64("2026-11-25T01:02:03", "ns"),
    np.complex64(1 + 2j), np.float32("nan"), np.dtype("float16"), Path("a/b"), PurePosixPath("c"),
    PureWindowsPath("C:/d"),
    datetime.datetime(2026, 11, 25, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1),
    datetime.datetime(2026, 6, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), datetime.date(2026, 1, 2), datetime.time(3, 4, 5),
    datetime.timedelta(days=-1, microseconds=7), datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST"),
    Mode.FAST, Rights.READ | Rights.WRITE, Rights(0), defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}),
    OrderedDict(b=1, a=2), Counter("aab"), deque([1, (2, 3)], maxlen=4), {1, "a"}, {(1, 2), Path("p")}, frozenset({1}),
    range(2, 9, 3), slice(1, None, 2), 1 + 2j, b"\0\xff", bytearray(b"ab"), ..., None, True, 2**200, -0.0, "\u00e9",
    torch.float16, torch.device("cpu"), torch.Size([2, 3]), decimal.Decimal("1.10"), fractions.Fraction(1, 3),
    uuid.UUID(int=5), Slotted(3), Pair(1, np.int8(2)), random.Random(3).getstate(), (1, [2, {3: (4,)}]),
    {Mode.FAST: 1, Path("k"): [2], np.int64(3): 4, (1, "x"): 5, 2.5: 6}, {"__ds_hf_type__": "range", "value": 1},
    [1], (),
    np.random.RandomState(4).get_state(legacy=False)["state"]["pos"], np.random.PCG64(3).state,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_type_and_value_come_back(value: Any) -> None:
    found = through_a_file({"at the top": value, "inside": [(value, {"deeper": value})]})
    for each in (found["at the top"], found["inside"][0][0], found["inside"][0][1]["deeper"]):
        assert type(each) is type(value)
        assert repr(each) == repr(value) or isinstance(value, set)  # its order is that of this process' hashes
        assert each == value or value != value
    if type(value) not in (str, int, float, bool, type(None), bytes, tuple, complex):
        assert found["at the top"] is found["inside"][0][0]
    assert repr(through_a_file(value)) == repr(value) or isinstance(value, set)


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 3), np.int8), np.array(5), np.array(["a", "bc"]), np.ones(3, ">f4")],
)
def test_arrays(array: Any) -> None:
    found = through_a_file({"x": array})["x"]
    assert (found.dtype, found.shape, found.flags.writeable) == (array.dtype, array.shape, True)
    assert np.array_equal(found, array)


def test_random_states_go_on() -> None:
    made = [np.random.RandomState(1), np.random.default_rng(2), random.Random(3), torch.Generator().manual_seed(4)]
    made[0].normal()
    found = through_a_file({"all": made, "state": np.random.RandomState(5).get_state()})
    assert [found["all"][0].normal(), found["all"][1].normal(), found["all"][2].gauss(0, 1)] == [
        made[0].normal(), made[1].normal(), made[2].gauss(0, 1)
    ]  # fmt: skip
    assert torch.equal(torch.randn(3, generator=found["all"][3]), torch.randn(3, generator=made[3]))
    other = np.random.RandomState()
    other.set_state(found["state"])
    assert other.randint(10**6) == np.random.RandomState(5).randint(10**6)


def test_a_dataclass_comes_back_without_its_code() -> None:
    found = through_a_file({"p": _progress()})["p"]
    assert type(found) is Progress
    assert vars(found) == vars(_progress())


def test_what_cannot_be_saved_is_named_and_the_rest_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on; of a list the others keep their places."""
    endless: list[Any] = [1]
    endless.append(endless)
    state = {
        "args": argparse.Namespace(lr=1, hook=lambda: 0), "list": [1, threading.Lock(), Mode.FAST], "endless": endless,
        "by function": defaultdict(lambda: 0), "objects": np.array([object()]), "step": np.int64(3),
        "array": np.ma.masked_array([1.0]),
    }  # fmt: skip
    with engine_of(config(1)) as engine, caplog.at_level(logging.WARNING):
        engine.save_checkpoint(tmp_path, client_state=state)
        found = engine.load_checkpoint(tmp_path)[1]
    assert found == {"args": argparse.Namespace(lr=1), "list": [1, None, Mode.FAST], "endless": [1, None], "step": 3}
    assert type(found["step"]) is np.int64
    for path in ("['args']['hook']", "['list'][1]", "['endless'][1]", "['by function']", "['objects']", "['array']"):
        assert f"client_state{path} is not saved, the rest is: " in caplog.text


class Settings(dict[str, Any]):
    """As hundreds of scripts have one."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Title(str):
    __slots__ = ()


def test_classes_that_derive_from_plain_ones_leave_their_values(caplog: pytest.LogCaptureFixture) -> None:
    state = {"args": Settings(lr=0.1, data=Settings(path="x", hook=threading.Lock())), "names": [Title("a"), "b"]}
    with caplog.at_level(logging.WARNING):
        found = restore(encode(state, "client_state"), "client_state")
    assert found == {"args": {"lr": 0.1, "data": {"path": "x"}}, "names": ["a", "b"]}
    assert type(found["args"]) is type(found["args"]["data"]) is dict
    for path in ("['args']", "['args']['data']", "['names'][0]"):
        assert f"client_state{path} is saved without its class: " in caplog.text
    assert "client_state['args']['data']['hook'] is not saved, the rest is: " in caplog.text
    with pytest.raises(
        CheckpointError, match=r"client_state\['args'\] cannot be saved: .*Settings, and its dict is what"
    ):
        encode({"args": Settings(lr=0.1)}, "client_state", strict=True)


class _Local:
    pass


def test_classes_that_are_not_there_give_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = encode({"m": Mode.FAST, "s": Slotted(3), "p": Pair(1, 2)}, "client_state")
    for name in ("Mode", "Slotted", "Pair"):
        monkeypatch.delattr(f"{__name__}.{name}")
    assert restore(kept, "client_state") == {"m": "fast", "s": {"a": 3}, "p": (1, 2)}


@pytest.mark.parametrize(
    "hostile",
    [
        {"__ds_hf_type__": "os.system", "value": "true"}, {"__ds_hf_type__": ["x"]}, {"__ds_hf_type__": "range"},
        {"__ds_hf_type__": "numpy.array", "value": ["O", [1], torch.zeros(8, dtype=torch.uint8)]},
        {"__ds_hf_type__": "numpy.array", "value": ["f4", [10**9], torch.zeros(8, dtype=torch.uint8)]},
        {"__ds_hf_type__": "defaultdict", "value": ["eval", {}]}, {"__ds_hf_type__": "timedelta", "value": [10**30]},
        {"__ds_hf_type__": "numpy.Generator", "value": {"bit_generator": "BitGenerator"}},
    ],
)  # fmt: skip
def test_nothing_in_a_file_is_believed(hostile: Any) -> None:
    with pytest.raises(CheckpointError, match=r"client_state\['x'\] is "):
        restore({"x": hostile}, "client_state")


@pytest.mark.parametrize("place", [("os", "system"), ("tests", "x.y"), ("subprocess", "Popen"), ("none", "A")])
def test_only_enums_dataclasses_and_named_tuples_are_made(place: tuple[str, str]) -> None:
    for kind, rest in (("enum", [["a"], 1]), ("dataclass", [{"a": 1}]), ("namedtuple", [["a"], [1]])):
        assert restore({"x": {"__ds_hf_type__": kind, "value": [*place, *rest]}}, "s")["x"] in (1, {"a": 1}, (1,))
