"""Weights that a constructor uses though they have been cut up: gathered while they are used, and cut up again.

Under ``zero.Init`` a parameter is sharded as the constructor of its module returns, but the constructors around it go
on: they initialise their children, copy them, read their statistics, run them to learn a shape. While ``Init`` is
active, parameters at rest are therefore of a class that *opens* a parameter at its first use: gathers it, and leaves it
an ordinary one until the constructor in which that happened returns. Then rank 0's values are taken, as ever under
``Init``. All processes run the same constructors, so they open and close the same parameters in the same order.

A constructor that goes through all parameters of the model must not hold all of them: beyond ``ROOM_NBYTES`` the oldest
are closed first, except those of which a view is still held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.at_rest import FORM, HARMLESS, AtRest, Released, tensors_of
from ds_hf.engine.zero.buffer import BufferState, FlatBuffer, buffers_of, leave_home

__all__ = ["ROOM_NBYTES", "OpenParameters", "opening", "rest_as"]

ROOM_NBYTES = 64 << 20


class OpenParameters:
    """The parameters that the running constructors have opened. Buffers here have one parameter each.

    Attributes:
        depth: constructors that run inside each other.
        rests_as: the class of parameters at rest that open themselves here.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.rests_as: type[AtRest] = type("Building", (_Building,), {"opened": self})
        self._open: dict[FlatBuffer, int] = {}
        self._stay: list[FlatBuffer] = []
        self._taken: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()

    def take(self, buffers: Iterable[FlatBuffer]) -> None:
        """Parameters of ``buffers`` open themselves here, until they are left."""
        found = list(buffers)
        rest_as(found, self.rests_as)
        self._taken.update(found)

    def leave(self) -> None:
        rest_as(self._taken, Released)

    def keep(self, buffer: FlatBuffer) -> None:
        """Gather ``buffer`` for as long as the model has no engine. Collective."""
        buffer.gather()
        buffer.hold.count += 1
        self._stay.append(buffer)

    def keeps(self, buffer: FlatBuffer) -> bool:
        return buffer in self._stay

    def open(self, buffers: Iterable[FlatBuffer]) -> None:
        """Make the parameters of ``buffers`` ordinary ones. Collective."""
        wanted = dict.fromkeys(buffers)
        for buffer in wanted:
            if buffer.state is not BufferState.GATHERED:  # or a GatheredParameters has it, and keeps what is written
                buffer.gather_exactly()
                buffer.hold.count += 1
                self._open[buffer] = self.depth
        excess = sum(_nbytes(buffer) for buffer in self._open) - ROOM_NBYTES
        for buffer in list(self._open):
            if excess > 0 and buffer not in wanted and not buffer.has_other_users:
                excess -= _nbytes(buffer)
                self._close(buffer)

    def close(self, depth: int = 0) -> None:
        """Cut up again what was opened at ``depth`` or deeper. Collective."""
        for buffer in [buffer for buffer, opened in self._open.items() if opened >= depth]:
            self._close(buffer)
        if not depth:
            for buffer in self._stay:
                buffer.write_back(0)

    def whole(self, data: Any) -> Any:
        """``data``; as ``nn.Parameter(data)`` needs it, which looks at the class before it looks at the values."""
        if isinstance(data, _Building):
            self.open([data._ds_home.buffer])  # type: ignore[attr-defined]
        return data

    def settle(self, buffer: FlatBuffer) -> None:
        """What was written to ``buffer`` is in its shards from now on. Collective, if it is gathered."""
        if buffer in self._open or buffer in self._stay:
            buffer.write_back(0)

    def abandon(self) -> None:
        """A constructor failed, perhaps on this rank alone."""
        for buffer in self._open:
            buffer.hold.count -= 1
            buffer.release(spare_users=True)
        self._open.clear()

    def _close(self, buffer: FlatBuffer) -> None:
        del self._open[buffer]
        buffer.hold.count -= 1
        param, view = buffer.params[0], buffer.views[0]
        # One process has its shard in the memory at which holders of the old values look.
        replaced = buffer.aliased and param.data_ptr() != view.data_ptr()
        if (param.shape, param.dtype) == (view.shape, view.dtype) and not replaced:
            buffer.write_back(0)
            buffer.release(spare_users=True)
        else:  # another tensor was put in: an ordinary parameter again, to be sharded as it is now
            leave_home(param)


@contextmanager
def opening(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters that ``Init`` sharded and that no engine has yet open themselves inside, as in its constructors:
    adapters are made around such weights, by decompositions, norms or shapes of them. Collective where one is read."""
    opened = OpenParameters()
    buffers = [b for b in buffers_of(params) if b.rests_as is Released and b.states is None and len(b.params) == 1]
    opened.take(buffers)
    try:
        yield
        opened.close()
    except BaseException:
        opened.abandon()
        raise
    finally:
        opened.leave()


def rest_as(buffers: Iterable[FlatBuffer], kind: type[AtRest]) -> None:
    """Parameters of ``buffers`` are of this class from now on while they are at rest."""
    for buffer in buffers:
        buffer.rests_as = kind
        for param in buffer.params:
            if isinstance(param, AtRest):
                param.__class__ = kind


def _nbytes(buffer: FlatBuffer) -> int:
    return buffer.layout.numel * buffer.dtype.itemsize


class _Building(AtRest):
    """A parameter at rest while ``Init`` is active."""

    opened: OpenParameters

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = Released.__deepcopy__(self, memo)  # type: ignore[arg-type]  # sharded, as it is
        self.opened.take(buffers_of([copied]))
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FORM:
            whole = args[0]._ds_home.slot.shape, args[0].dtype
            args = (torch.Tensor.new_empty(_NOWHERE, whole[0], dtype=whole[1]), *args[1:])
        elif func not in HARMLESS:
            cls.opened.open(param._ds_home.buffer for param in tensors_of(_Building, (args, kwargs)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_NOWHERE: Tensor = torch.empty(0, device="meta")
