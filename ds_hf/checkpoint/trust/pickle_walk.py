"""Going through a pickle without making what it asks for, to know what making it would take.

A few bytes of a pickle can stand for much: a list of two references to a list of two references, forty levels deep,
has 10**12 elements for who goes through it; a tensor with strides of 0 has as many elements as its shape says;
``bytearray(2**31)`` is an allowed call; a nested tuple as a key is hashed anew at each use. So the pickle is walked by
an unpickler in which every name stands for an inert object; what calls would make is counted while it goes, and what
the result holds, each reference counted as often as it is met, when it is done.

Invariant: after ``walk`` making the content, going through it and copying it takes objects and bytes in proportion to
the file (``Limits``). Walking takes time in proportion to the pickle.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ds_hf.checkpoint.trust.archive import Refused

__all__ = ["FrugalUnpickler", "Limits", "walk"]

_DEEP = 200  # levels: readers call themselves for each
_WIDE_INT = 2**61 - 1  # of integers beyond it many have the same hash

_ITEMSIZES = {f"{name}Storage": itemsize for itemsize, names in {
    1: ("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"),
    2: ("Short", "Half", "BFloat16"),
    4: ("Int", "Float", "QInt32"),
    8: ("Long", "Double", "ComplexFloat"),
    16: ("ComplexDouble",),
}.items() for name in names}  # fmt: skip
_REBUILT = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
_TEXTS = frozenset((str, bytes, bytearray))
_LEAVES = frozenset((int, float, bool, type(None), *_TEXTS))
_HASHING = ("set", "frozenset", "OrderedDict", "Counter")
_CONTAINERS = (*_HASHING, "Size", "bytearray", "complex", "encode")


@dataclass
class Limits:
    """What a file may take: objects in proportion to its pickle, bytes to the whole; room for what is shared.

    Args:
        pickled: bytes of the pickle; without references each object takes one at least.
        nbytes: bytes of the file.
    """

    pickled: int
    nbytes: int
    objects: int = field(init=False)
    content: int = field(init=False)

    def __post_init__(self) -> None:
        self.objects = 2**17 + 4 * self.pickled
        self.content = 2**26 + 4 * self.nbytes

    def check(self, objects: int, nbytes: int) -> None:
        """Raise ``Refused`` for more than a file of this size may hold."""
        if objects > self.objects:
            raise Refused(f"it holds more than {self.objects} objects when its references are followed")
        if nbytes > self.content:
            raise Refused(f"it stands for {_shown(nbytes)} bytes, which is far larger than the file")


def _shown(count: int) -> str:
    return str(count) if count < 10**18 else "more than 10**18"


def walk(content: bytes, prefix: str, records: dict[str, int], nbytes: int) -> None:
    """Raise ``Refused``, or whatever a damaged pickle makes Python raise, unless ``content`` may be loaded.

    Args:
        prefix: of the names of storages among ``records``, which have their sizes in bytes.
        nbytes: of the file.
    """
    limits = Limits(len(content), nbytes)
    _weigh(_Walker(content, prefix, records, limits).load(), limits)


# -- what a pickle makes --------------------------------------------------------------------------------------------


class _Inert:
    """Stands for whatever a pickle names or makes; keeps what it is given and does nothing.

    Attributes:
        nbytes: of a storage its record's, of a tensor what its shape says.
        parts: what it would hold.
    """

    __slots__ = ("name", "nbytes", "parts")

    def __init__(self, name: str, nbytes: int = 0, parts: Iterable[Any] = ()) -> None:
        self.name, self.nbytes, self.parts = name, nbytes, list(parts)

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += (key, value)

    def append(self, value: Any) -> None:
        self.parts.append(value)

    add = append

    def extend(self, values: Iterable[Any]) -> None:
        self.parts += values

    update = extend


class _Tensor(_Inert):
    """A tensor, or what is like one, as the pickle describes it."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise Refused("it changes a tensor after it was made")


class _Call(_Inert):
    """A name in the pickle; calling it checks and counts what the real one would make."""

    __slots__ = ("spent",)

    def __init__(self, name: str, spent: _Spent) -> None:
        super().__init__(name)
        self.spent = spent

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        short = self.name.rpartition(".")[2]
        if short == "_rebuild_from_type_v2" and arguments and isinstance(arguments[0], _Call):
            return _Tensor(self.name, parts=(arguments[0](*arguments[2]), *arguments[3:]))
        if short in _REBUILT:
            return _tensor(arguments)
        if short == "_rebuild_wrapper_subclass":
            raise Refused("it makes a tensor without elements of its own")
        if short.endswith(("Storage", "Tensor")) and arguments and self.name.startswith("torch"):
            raise Refused(f"it calls {self.name} for memory of its own")
        if short in _CONTAINERS:
            return self._container(short, arguments)
        if short == "_rebuild_device_tensor_from_cpu_tensor":  # perhaps a copy of another dtype
            self.spent.spend(1, sum(16 * part.nbytes for part in arguments if isinstance(part, _Inert)))
        kind = _Tensor if short.startswith("_rebuild") or short.endswith(("Tensor", "Parameter")) else _Inert
        return kind(self.name, parts=(*arguments, *options.values()))

    def _container(self, short: str, arguments: tuple[Any, ...]) -> Any:
        """A copy of what the argument holds: made as often as it is asked for."""
        if short == "bytearray" and arguments and not isinstance(arguments[0], bytes | str):
            raise Refused("it asks for memory that it does not fill")
        if short == "encode" and arguments[1:] not in ((), ("latin1",), ("utf-8",)):
            raise Refused("it encodes text in an unusual way")
        for argument in arguments:
            if isinstance(argument, bytes | str):
                self.spent.spend(1, 2 * len(argument))
            elif isinstance(argument, list | tuple | dict | set | frozenset):
                self.spent.spend(1 + len(argument), 64 * len(argument))
                for item in argument if short in _HASHING else ():
                    pair = short == "OrderedDict" and isinstance(item, list | tuple) and item
                    self.spent.hashed(item[0] if pair else item)
            elif isinstance(argument, _Inert):
                raise Refused(f"it makes a {short} of a {argument.name}")
        if short == "encode":  # plain bytes: what a bytearray is made of
            return str(arguments[0]).encode(*arguments[1:])
        if short == "Size":
            return tuple(arguments[0]) if arguments else ()
        return _Inert(self.name, parts=arguments)


def _tensor(arguments: tuple[Any, ...]) -> _Tensor:
    """A tensor of (storage, offset, shape, strides, ...): a large shape with strides of 0 needs no bytes on disk."""
    storage, _, shape = arguments[:3]
    if not isinstance(storage, _Inert) or not isinstance(shape, tuple):
        raise Refused("it builds a tensor from something that is not a storage")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in shape) or len(shape) > 64:
        raise Refused("it has a tensor of an impossible shape")
    itemsize = _ITEMSIZES.get(storage.name.rpartition(".")[2], 1)
    for argument in arguments[3:]:
        if isinstance(argument, _Call):
            itemsize = max(itemsize, getattr(getattr(torch, argument.name.rpartition(".")[2], None), "itemsize", 1))
    return _Tensor(storage.name, math.prod(shape) * itemsize, arguments[4:])


# -- what it takes --------------------------------------------------------------------------------------------------


class _Spent:
    """What was made or hashed on the way, whether or not the result holds it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._objects = self._nbytes = 0
        self._tuples: dict[int, tuple[tuple[Any, ...], int, int]] = {}  # itself, its elements at all levels, levels
        self._alike: dict[int, int] = {}

    def spend(self, objects: int, nbytes: int) -> None:
        self._objects += objects
        self._nbytes += nbytes
        self._limits.check(self._objects, self._nbytes)

    def tuple_made(self, made: tuple[Any, ...]) -> None:
        """Tuples can be keys, and their hash is computed anew from all they hold each time."""
        inner = [item for item in made if type(item) is tuple]
        if not inner:
            return
        known = [self._tuples.get(id(item), (item, 1 + len(item), 1)) for item in inner]
        elements = 1 + len(made) + sum([entry[1] for entry in known])
        levels = 1 + max([entry[2] for entry in known])
        if levels > _DEEP:
            raise Refused(f"it is nested more than {_DEEP} levels deep")
        self._limits.check(elements, 0)
        self._tuples[id(made)] = (made, elements, levels)

    def hashed(self, key: Any) -> None:
        """A key of a dictionary or an element of a set."""
        if type(key) is tuple:
            self.spend(self._tuples.get(id(key), (key, 1 + len(key), 1))[1], 0)
        elif type(key) is int and not -_WIDE_INT < key < _WIDE_INT:
            self._alike[hash(key)] = self._alike.get(hash(key), 0) + 1
            self.spend(self._alike[hash(key)] // 4, 0)
        elif isinstance(key, _Inert) and key.name.endswith("complex"):
            raise Refused("it has a complex number as a key")


def _weigh(root: Any, limits: Limits) -> None:
    """Count objects and bytes as who goes through all references meets them; each object is looked at once."""
    known: dict[int, tuple[int, int, int]] = {}  # objects, bytes and levels of what was counted
    begun: dict[int, list[Any]] = {}  # what has parts that are counted first
    stack: list[Any] = [root]
    while stack:
        value = stack[-1]
        inner = begun.pop(id(value), None)
        if id(value) in known:
            stack.pop()
            continue
        if inner is None:
            inner = [child for child in _children(value) if type(child) not in _LEAVES]
            missing = [child for child in inner if id(child) not in known]
            if missing:
                if any(id(child) in begun for child in missing) or any(child is value for child in missing):
                    raise Refused("it holds itself")
                begun[id(value)] = inner
                stack += missing
                continue
        known[id(value)] = _sum_up(value, inner, known)
        limits.check(*known[id(value)][:2])
        if known[id(value)][2] > _DEEP:
            raise Refused(f"it is nested more than {_DEEP} levels deep")
        stack.pop()


def _sum_up(value: Any, inner: list[Any], known: dict[int, tuple[int, int, int]]) -> tuple[int, int, int]:
    children = _children(value)
    objects, levels = 1 + len(children) - len(inner), 0
    nbytes = sum([len(child) for child in children if type(child) in _TEXTS])
    nbytes += value.nbytes if isinstance(value, _Tensor) else 0
    for child in inner:
        more, size, deep = known[id(child)]
        objects, nbytes, levels = objects + more, nbytes + size, max(levels, deep)
    return objects, nbytes, levels + 1


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return list(value)
    return value.parts if isinstance(value, _Inert) else ()


# -- unpicklers -----------------------------------------------------------------------------------------------------


class FrugalUnpickler(pickle._Unpickler):
    """Takes no memory for what is not there: the class in C makes its memo as large as a pickle of 20 bytes says."""

    dispatch: ClassVar[dict[int, Any]] = {
        key: value
        for key, value in pickle._Unpickler.dispatch.items()
        if key not in (pickle.BYTEARRAY8[0], pickle.NEXT_BUFFER[0])  # the one makes room before it has read
    }


class _Walker(FrugalUnpickler):
    """Goes through a pickle without making anything but plain containers."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes, prefix: str, records: dict[str, int], limits: Limits) -> None:
        super().__init__(io.BytesIO(content))
        self._prefix, self._records, self._spent = prefix, records, _Spent(limits)

    def find_class(self, module: str, name: str) -> Any:
        return _Call(f"{module}.{name}", self._spent)

    def persistent_load(self, pid: Any) -> Any:
        """A storage: ``("storage", type, key, location, numel)``."""
        if not isinstance(pid, tuple) or len(pid) != 5 or not isinstance(pid[1], _Call):
            raise Refused("it refers to something that is not a storage")
        _, kind, key, _, numel = pid
        short = kind.name.rpartition(".")[2]
        itemsize = _ITEMSIZES.get(short)
        if itemsize is None:
            raise Refused(f"it has a storage of unknown type {kind.name}")
        record = self._records.get(f"{self._prefix}{key}")
        if type(numel) is not int or record != numel * itemsize:
            raise Refused(f"its storage {key!r} claims {numel} elements, which its record does not have")
        return _Inert(kind.name)

    def _new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(kind(*arguments))

    def _set_item(self) -> None:
        self._spent.hashed(self.stack[-2])
        self._plain(pickle.SETITEM)

    def _set_items(self) -> None:
        for key in self.stack[::2]:
            if type(key) is not str:
                self._spent.hashed(key)
        self._plain(pickle.SETITEMS)

    def _add_items(self) -> None:
        for item in self.stack:
            self._spent.hashed(item)
        self._plain(pickle.ADDITEMS)

    def _frozen_set(self) -> None:
        for item in self.stack:
            self._spent.hashed(item)
        self._plain(pickle.FROZENSET)

    def _plain(self, opcode: bytes) -> None:
        FrugalUnpickler.dispatch[opcode[0]](self)

    def _tuple(self) -> None:
        made = tuple(self.pop_mark())
        self._spent.tuple_made(made)
        self.append(made)

    def _short_tuple(self, count: int) -> None:
        made = tuple(self.stack[-count:])
        self._spent.tuple_made(made)
        self.stack[-count:] = [made]

    dispatch: ClassVar[dict[int, Any]] = {
        **{
            key: value
            for key, value in FrugalUnpickler.dispatch.items()
            if key not in (pickle.DICT[0], pickle.NEWOBJ_EX[0])  # torch writes neither
        },
        pickle.NEWOBJ[0]: _new,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozen_set,
        pickle.TUPLE[0]: _tuple,
        pickle.TUPLE1[0]: lambda self: self._short_tuple(1),
        pickle.TUPLE2[0]: lambda self: self._short_tuple(2),
        pickle.TUPLE3[0]: lambda self: self._short_tuple(3),
    }
