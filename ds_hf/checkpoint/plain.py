"""Values of scripts in files that are read without running code: ``client_state``, states of schedulers.

What ``torch.load(weights_only=True)`` does not give back, or not in all versions, is written as a plain dict that says
what it was: ``{"__ds_hf_type__": "range", "value": [0, 5, 1]}``. Restoring calls only what this module names. Members
of enums, dataclasses and named tuples are looked up, by name, in modules that are imported already, and made without
calling their class.

Invariant: ``restore(encode(value))`` has the types, values and shared objects of ``value``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import random
import sys
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hf.checkpoint.files import _loads
from ds_hf.errors import CheckpointError
from ds_hf.log import warn_once
from ds_hf.printable import harmless

__all__ = ["encode", "restore"]

_TAG = "__ds_hf_type__"
_DEEP = 150  # levels of what is written: readers refuse more than 200
_PLAIN = (type(None), bool, int, float, str)
_TORCH = (torch.dtype, torch.device, torch.Size, bytes, bytearray)  # read by all versions, of which none makes others
_FACTORIES = {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, OrderedDict, deque, Counter)
}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
_KINDS = "biufcSUMm"  # of numpy's dtypes: numbers, texts and times; the rest holds objects or fields
_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


class _Lost(Exception):
    """Why a value cannot be written."""


# -- writing --------------------------------------------------------------------------------------------------------


def encode(value: Any, where: str, *, strict: bool = False) -> Any:
    """``value`` as a dict that a file holds. What cannot be is left out, with a warning that names it and says why; of
    classes that derive from dict, list, tuple, str, int or float the values are kept, without the class.

    Args:
        where: what ``value`` is called.
        strict: nothing may be left out.

    Raises:
        CheckpointError: ``strict``, and something would be.
    """
    encoder = _Encoder()
    made = encoder.encode(value, where, 0)
    if _loads(made) is not None:  # a tensor of a kind of its own, most likely
        encoder = _Encoder(try_leaves=True)
        made = encoder.encode(value, where, 0)
        why = _loads(made) if made is not _NOTHING else None
        if why is not None:
            made, encoder.lost = _NOTHING, {where: why}
    if strict and (short := encoder.lost | encoder.changed):
        path, why = next(iter(short.items()))
        raise CheckpointError(f"{path} cannot be saved: {why}")
    for path, why in encoder.lost.items():
        warn_once(f"{path} is not saved, the rest is: {why}")
    for path, why in encoder.changed.items():
        warn_once(f"{path} is saved without its class: {why}")
    if made is _NOTHING:
        return {}
    return made if isinstance(made, dict) else {_TAG: "value", "value": made}


_NOTHING = object()  # in place of what is left out
_BASES: tuple[type[Any], ...] = (dict, list, tuple, str, int, float)


class _Encoder:
    def __init__(self, *, try_leaves: bool = False) -> None:
        self.lost: dict[str, str] = {}
        self.changed: dict[str, str] = {}
        self._try = try_leaves
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # what is remembered by its id has to live
        self._open: set[int] = set()

    def encode(self, value: Any, where: str, depth: int) -> Any:
        """The value as it is written, or ``_NOTHING``."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        try:
            if id(value) in self._open:
                raise _Lost("it contains itself")
            if depth > _DEEP:
                raise _Lost(f"it lies {depth} levels deep")
            self._open.add(id(value))
            try:
                made = self._encode(value, where, depth + 1)
            finally:
                self._open.discard(id(value))
        except _Lost as why:
            self.lost[where] = str(why)
            return _NOTHING
        except Exception as error:  # of the value's own methods
            self.lost[where] = f"{type(error).__name__}: {error}"
            return _NOTHING
        self._kept.append(value)
        self._made[id(value)] = made
        return made

    def _encode(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return kind(self._items(value, where, depth))
        if kind in (dict, OrderedDict):
            return self._mapping(value, where, depth)
        if kind is set and all(type(each) in _PLAIN for each in value):
            return set(value)
        if kind in _TORCH:
            return value
        if isinstance(value, Tensor):
            self._check_leaf(value)
            return value
        for matches, name, parts in _WAYS:
            if isinstance(value, matches) if isinstance(matches, type | tuple) else matches(value):
                return self._tagged(name, parts(value), where, depth)
        if _loads(value) is None:
            return value
        cannot = (
            f"a checkpoint, which is read without running code, cannot hold a {kind.__module__}.{kind.__qualname__}"
        )
        base = next((base for base in _BASES if isinstance(value, base)), None)
        if base is None:
            raise _Lost(f"{cannot}; store numbers, texts, tensors, lists and dicts in its place, or its state_dict()")
        made = self.encode(base(value), where, depth)
        if made is not _NOTHING:
            self.changed[where] = f"{cannot}, and its {base.__name__} is what a load will give"
        return made

    def _check_leaf(self, value: Tensor) -> None:
        why = _loads(value) if self._try else None
        if why is not None:
            raise _Lost(f"torch.load(weights_only=True) does not read it ({why})")

    def _tagged(self, name: str, parts: Any, where: str, depth: int) -> dict[str, Any]:
        inner = self.encode(parts, where, depth)
        if inner is _NOTHING:
            raise _Lost(self.lost.pop(where))
        return {_TAG: name, "value": inner}

    def _items(self, values: Iterable[Any], where: str, depth: int) -> list[Any]:
        """What is left out leaves ``None``: the others keep their places."""
        values = list(values)
        if all(type(each) in _PLAIN for each in values):
            return values
        made = [self.encode(each, f"{where}[{index}]", depth) for index, each in enumerate(values)]
        return [None if each is _NOTHING else each for each in made]

    def _mapping(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        plain = all(type(key) in _PLAIN or _is_plain_tuple(key) for key in value) and _TAG not in value
        made = []
        for key, each in value.items():
            inner = self.encode(each, f"{where}[{key!r:.80}]", depth)
            name = key if plain else self.encode(key, f"the key {key!r:.80} of {where}", depth)
            if inner is not _NOTHING and name is not _NOTHING:
                made.append((name, inner))
        if not plain:
            return {_TAG: "mapping", "value": [type(value).__name__, [list(pair) for pair in made]]}
        found = type(value)(made)
        if vars_of := getattr(value, "__dict__", None):  # versions of modules beside their state dict
            found.__dict__.update(self.encode(dict(vars_of), f"vars({where})", depth))
        return found


def _is_plain_tuple(key: Any) -> bool:
    return type(key) is tuple and all(type(each) in _PLAIN for each in key)


def _zone(value: Any) -> Any:
    if value is None or type(value) is datetime.timezone:
        return value
    if isinstance(value, zoneinfo.ZoneInfo) and value.key:
        return value.key
    raise _Lost(f"its time zone is a {type(value).__name__}; use datetime.timezone or zoneinfo.ZoneInfo(name)")


def _factory(value: Any) -> Any:
    if value is None:
        return None
    name = getattr(value, "__name__", "")
    if _FACTORIES.get(name) is not value:
        raise _Lost(f"its default_factory is {value!r:.80}; a dict, or one of {', '.join(_FACTORIES)}, can be saved")
    return name


def _array(value: Any) -> list[Any]:
    if value.dtype.kind not in _KINDS:
        raise _Lost(f"its dtype {value.dtype} holds more than numbers and texts")
    raw = np.ascontiguousarray(value).tobytes()
    content = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return [value.dtype.str, list(value.shape), content]


def _member(value: enum.Enum) -> list[Any]:
    names = [value.name] if value.name in type(value).__members__ else None
    if names is None and isinstance(value, enum.Flag):
        names = [str(each.name) for each in type(value) if each.value and each in value]
    if names is None:
        raise _Lost("it is no member of its enum by name")
    return [*_place(type(value)), names, value.value if type(value.value) in _PLAIN else str(value.name)]


def _place(kind: type) -> list[str]:
    if _find(kind.__module__, kind.__qualname__) is not kind:
        raise _Lost(f"its class {kind.__qualname__} is not found in its module {kind.__module__}: define it there")
    return [kind.__module__, kind.__qualname__]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


_Way = tuple[Any, str, Callable[[Any], Any]]
# Which values are written how: the first that fits.
_WAYS: list[_Way] = [
    (enum.Enum, "enum", _member),
    (lambda v: isinstance(v, np.generic), "numpy.scalar", lambda v: _array(np.asarray(v))),
    (lambda v: type(v) is np.ndarray, "numpy.array", _array),
    (np.dtype, "numpy.dtype", lambda v: _array(np.empty(0, v))[0]),
    (lambda v: type(v) is np.random.RandomState, "numpy.RandomState", lambda v: v.get_state(legacy=False)),
    (lambda v: type(v) is np.random.Generator, "numpy.Generator", lambda v: v.bit_generator.state),
    (lambda v: type(v) is random.Random, "random.Random", lambda v: v.getstate()),
    (lambda v: type(v) is torch.Generator and v.device.type == "cpu", "torch.Generator", lambda v: v.get_state()),
    (lambda v: type(v) is argparse.Namespace, "Namespace", lambda v: dict(vars(v))),
    (lambda v: type(v) is types.SimpleNamespace, "SimpleNamespace", lambda v: dict(vars(v))),
    (lambda v: type(v) in _PATHS, "path", lambda v: [type(v).__name__, str(v)]),
    (lambda v: type(v) is datetime.datetime, "datetime",
     lambda v: [v.replace(tzinfo=None, fold=0).isoformat(), v.fold, _zone(v.tzinfo)]),
    (lambda v: type(v) is datetime.date, "date", lambda v: v.isoformat()),
    (lambda v: type(v) is datetime.time, "time",
     lambda v: [v.replace(tzinfo=None, fold=0).isoformat(), v.fold, _zone(v.tzinfo)]),
    (lambda v: type(v) is datetime.timedelta, "timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    (lambda v: type(v) is datetime.timezone, "timezone", lambda v: list(v.__getinitargs__())),
    (lambda v: type(v) is zoneinfo.ZoneInfo, "ZoneInfo", _zone),
    (lambda v: type(v) is decimal.Decimal, "Decimal", str),
    (lambda v: type(v) is fractions.Fraction, "Fraction", lambda v: [v.numerator, v.denominator]),
    (lambda v: type(v) is uuid.UUID, "UUID", lambda v: v.hex),
    (lambda v: type(v) is complex, "complex", lambda v: [v.real, v.imag]),
    (lambda v: type(v) is range, "range", lambda v: [v.start, v.stop, v.step]),
    (lambda v: type(v) is slice, "slice", lambda v: [v.start, v.stop, v.step]),
    (lambda v: v is Ellipsis, "Ellipsis", lambda v: None),
    (lambda v: type(v) is set, "set", list),
    (lambda v: type(v) is frozenset, "frozenset", list),
    (lambda v: type(v) is deque, "deque", lambda v: [list(v), v.maxlen]),
    (lambda v: type(v) is Counter, "Counter", dict),
    (lambda v: type(v) is defaultdict, "defaultdict", lambda v: [_factory(v.default_factory), dict(v)]),
    (_is_dataclass, "dataclass",
     lambda v: [*_place(type(v)), {f.name: getattr(v, f.name) for f in dataclasses.fields(v) if hasattr(v, f.name)}
                | getattr(v, "__dict__", {})]),
    (_is_named_tuple, "namedtuple", lambda v: [*_place(type(v)), list(v._fields), list(v)]),
]  # fmt: skip


# -- reading --------------------------------------------------------------------------------------------------------


def restore(value: Any, where: str) -> Any:
    """What ``encode`` was given; files of before, and of others, hold nothing that would be changed.

    Raises:
        CheckpointError: something is not as ``encode`` writes it, by its place.
    """
    return _Restorer().restore(value, where)


class _Restorer:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def restore(self, value: Any, where: str) -> Any:
        """The value that ``value``, which stays alive, stands for."""
        if type(value) not in (dict, OrderedDict, list, tuple):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._restore(value, where)
        return self._made[id(value)]

    def _restore(self, value: Any, where: str) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self.restore(each, f"{where}[{index}]") for index, each in enumerate(value)])
        if type(value) is OrderedDict or _TAG not in value:
            made = type(value)((key, self.restore(each, f"{where}[{key!r:.80}]")) for key, each in value.items())
            if type(value) is OrderedDict:
                made.__dict__.update(value.__dict__)
            return made
        kind = value[_TAG]
        if not isinstance(kind, str) or kind not in _MAKERS:
            raise CheckpointError(f"{where} is a {kind!r:.80}, which this version of ds_hf does not know")
        inner = self.restore(value.get("value"), where)
        try:
            return _MAKERS[kind](inner, where)
        except CheckpointError:
            raise
        except Exception as error:  # a stranger's may be anything
            reason = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(f"{where} is not a {kind} as it was saved: {reason}") from harmless(error)


def _find(module: str, name: str) -> Any:
    """A class in a module that is imported; nothing is imported, and no attribute is computed, to find it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found


def _known_class(module: str, name: str, fits: Callable[[Any], bool], where: str) -> Any:
    found = _find(module, name)
    if isinstance(found, type) and fits(found):
        return found
    warn_once(
        f"{where} was a {module}.{name}, which is not there now: its plain value is given. Import {module} before "
        "load_checkpoint() to have it"
    )
    return None


def _make_member(inner: Any, where: str) -> Any:
    module, name, names, plain = inner
    kind = _known_class(module, name, lambda k: issubclass(k, enum.Enum), where)
    if kind is None:
        return plain
    members = [kind.__members__[each] for each in names]
    if not members and not issubclass(kind, enum.Flag):
        raise ValueError("it names no member")
    return functools.reduce(operator.or_, members) if members else kind(0)


def _make_dataclass(inner: Any, where: str) -> Any:
    module, name, kept = inner
    kind = _known_class(module, name, dataclasses.is_dataclass, where)
    if kind is None:
        return kept
    made = object.__new__(kind)
    if hasattr(made, "__dict__"):
        made.__dict__.update(kept)  # no property of the class is asked
        return made
    for field in dataclasses.fields(kind):
        if field.name in kept:
            object.__setattr__(made, field.name, kept[field.name])
    return made


def _make_named_tuple(inner: Any, where: str) -> Any:
    module, name, fields, values = inner
    wanted = tuple(fields)
    kind = _known_class(module, name, lambda k: issubclass(k, tuple) and getattr(k, "_fields", 0) == wanted, where)
    return tuple(values) if kind is None else tuple.__new__(kind, values)


def _make_array(inner: Any) -> Any:
    text, shape, content = inner
    kind = _make_dtype(text)
    if not isinstance(content, Tensor) or content.dtype is not torch.uint8:
        raise ValueError("it has no bytes")
    return np.frombuffer(content.numpy().tobytes(), kind).reshape([int(each) for each in shape]).copy()


def _make_dtype(text: Any) -> Any:
    kind = np.dtype(str(text))
    if kind.kind not in _KINDS:
        raise ValueError(f"dtype {kind}")
    return kind


def _make_random_state(state: Any) -> Any:
    made = np.random.RandomState(0)
    made.set_state(state)
    return made


def _make_generator(state: Any) -> Any:
    if state["bit_generator"] not in _GENERATORS:
        raise ValueError(f"{state['bit_generator']!r:.80} is no generator of numpy")
    bits = getattr(np.random, state["bit_generator"])(0)
    bits.state = state
    return np.random.Generator(bits)


def _make_random(state: Any) -> Any:
    made = random.Random(0)
    made.setstate(state)
    return made


def _make_torch_generator(state: Any) -> Any:
    made = torch.Generator()
    made.set_state(state)
    return made


def _make_path(inner: Any) -> pathlib.PurePath:
    name, text = inner
    kind = next(each for each in _PATHS if each.__name__ == name)
    try:
        return kind(text)
    except NotImplementedError:  # another system's
        return kind.__mro__[2](text)  # type: ignore[no-any-return]


def _zoned(value: Any, fold: int, zone: Any) -> Any:
    return value.replace(fold=fold, tzinfo=zoneinfo.ZoneInfo(zone) if isinstance(zone, str) else zone)


def _make_namespace(made: Any, kept: Any) -> Any:
    made.__dict__.update({str(key): each for key, each in kept.items()})
    return made


def _make_mapping(inner: Any) -> Any:
    name, pairs = inner
    return {"dict": dict, "OrderedDict": OrderedDict}[name]((key, each) for key, each in pairs)


_MAKERS: dict[str, Callable[[Any, str], Any]] = {
    "enum": _make_member,
    "dataclass": _make_dataclass,
    "namedtuple": _make_named_tuple,
    "mapping": lambda v, _: _make_mapping(v),
    "numpy.scalar": lambda v, _: _make_array(v)[()],
    "numpy.array": lambda v, _: _make_array(v),
    "numpy.dtype": lambda v, _: _make_dtype(v),
    "numpy.RandomState": lambda v, _: _make_random_state(v),
    "numpy.Generator": lambda v, _: _make_generator(v),
    "random.Random": lambda v, _: _make_random(v),
    "torch.Generator": lambda v, _: _make_torch_generator(v),
    "Namespace": lambda v, _: _make_namespace(argparse.Namespace(), v),
    "SimpleNamespace": lambda v, _: _make_namespace(types.SimpleNamespace(), v),
    "value": lambda v, _: v,
    "path": lambda v, _: _make_path(v),
    "datetime": lambda v, _: _zoned(datetime.datetime.fromisoformat(v[0]), *v[1:]),
    "date": lambda v, _: datetime.date.fromisoformat(v),
    "time": lambda v, _: _zoned(datetime.time.fromisoformat(v[0]), *v[1:]),
    "timedelta": lambda v, _: datetime.timedelta(*v),
    "timezone": lambda v, _: datetime.timezone(*v),
    "ZoneInfo": lambda v, _: zoneinfo.ZoneInfo(v),
    "Decimal": lambda v, _: decimal.Decimal(v),
    "Fraction": lambda v, _: fractions.Fraction(*v),
    "UUID": lambda v, _: uuid.UUID(v),
    "complex": lambda v, _: complex(*v),
    "range": lambda v, _: range(*v),
    "slice": lambda v, _: slice(*v),
    "Ellipsis": lambda v, _: ...,
    "set": lambda v, _: set(v),
    "frozenset": lambda v, _: frozenset(v),
    "deque": lambda v, _: deque(*v),
    "Counter": lambda v, _: Counter(v),
    "defaultdict": lambda v, _: defaultdict(None if v[0] is None else _FACTORIES[v[0]], v[1]),
}
