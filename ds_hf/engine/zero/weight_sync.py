"""From what the optimizer wrote to the parameters everywhere, at once or beside the next forward.

Sharded parameters are gathered when they are needed. Replicated ones are gathered after the step, beside what comes
next: a deferred all-gather. Small buffers share a launch.

Until its all-gather has been waited for, a parameter is *pending*: it is of a class of its own. Code that touches one,
other than to ask for what is not its values, waits first - the current stream does, not the host - and finds an
ordinary parameter. Tensors that share a parameter's memory cannot be guarded so: where there are such, nothing is
deferred.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import Awaited, CommStream
from ds_hf.engine.zero.gathering import Gathering
from ds_hf.engine.zero.layout import Labels

__all__ = ["can_be_pending", "mark_arrived", "mark_pending", "sync_weights"]

# What may be asked of a parameter before its values are there: its gradient, its form, hooks.
_FORM = ("device", "dtype", "grad", "is_cuda", "is_leaf", "ndim", "requires_grad", "shape")
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in _FORM),
    *(getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__set__", "__delete__")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex),
}


class _Pending(nn.Parameter):
    """A parameter whose values are on the way. ``_ds_arrive`` makes it an ordinary one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            for tensor in _pending_in((args, kwargs)):
                if type(tensor) is _Pending:  # one arrives with all of its unit
                    tensor.__dict__["_ds_arrive"]()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.__dict__["_ds_arrive"]()  # torch's own asks for the class first
        return copy.deepcopy(self, memo)


def can_be_pending(params: Iterable[nn.Parameter]) -> bool:
    """Whether all are ordinary parameters."""
    return all(type(param) is nn.Parameter for param in params)


def mark_pending(params: Iterable[nn.Parameter], arrive: Callable[[], None]) -> None:
    """From now on ``arrive`` is called before any use of the values of ``params``; it must call ``mark_arrived``."""
    for param in params:
        param.__dict__["_ds_arrive"] = arrive
        param.__class__ = _Pending


def mark_arrived(params: Iterable[nn.Parameter]) -> None:
    """They are ordinary parameters again."""
    for param in params:
        if type(param) is _Pending:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            del param.__dict__["_ds_arrive"]


def _pending_in(value: Any) -> list[_Pending]:
    if type(value) is _Pending:
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _pending_in(item)]


# -- the all-gather after a step -----------------------------------------------------------------------------------

# Of a launch: the first is short, for the next forward waits for it; each later one is twice as long as that before it,
# up to a millisecond of NVLink.
_FIRST_NBYTES, _LAST_NBYTES = 32 << 20, 256 << 20


class _Buffer(Protocol):
    """A flat buffer as the gathers after a step see it."""

    axis: Axis
    sharded: bool
    comm_stream: CommStream
    gathering: Gathering
    labels: Labels

    @property
    def full(self) -> Tensor: ...
    @property
    def shard(self) -> Tensor: ...
    def refresh(self) -> None: ...
    def check_views(self) -> None: ...
    def fill(self) -> None: ...
    def defer_gather(self, arrival: Awaited | None) -> bool: ...


def sync_weights(buffers: Sequence[_Buffer], *, whole: bool) -> None:
    """Make what was written to ``owned`` the parameters' values on all ranks. Collective.

    Args:
        whole: every rank wrote everything.

    Raises:
        DsHfError: parameters are no longer where their buffer keeps them.
    """
    together: list[_Buffer] = []
    nbytes, enough = 0, _FIRST_NBYTES
    for buffer in buffers:
        if buffer.sharded:
            buffer.refresh()
            continue
        buffer.check_views()
        if whole:
            continue
        if together and buffer.axis != together[0].axis:
            _gather(together)
            together, nbytes = [], 0
        together.append(buffer)
        nbytes += buffer.full.nbytes
        if nbytes >= enough:
            _gather(together)
            together, nbytes, enough = [], 0, min(2 * enough, _LAST_NBYTES)
    if together:
        _gather(together)


def _gather(buffers: Sequence[_Buffer]) -> None:
    comm_stream, axis = buffers[0].comm_stream, buffers[0].axis
    with comm_stream:
        copied = [buffer for buffer in buffers if buffer.gathering.region is not None]
        for buffer in copied:
            buffer.fill()
        if copied and copied[0].gathering.peers is not None:
            copied[0].gathering.peers.meet()  # users may write to parameters once they have arrived
        rest = [buffer for buffer in buffers if buffer.gathering.region is None]
        fulls, shards = [b.full for b in rest], [b.shard for b in rest]
        collectives.all_gather_each(fulls, shards, axis, [b.labels.weights for b in rest])
    arrival = comm_stream.event() if axis.world_size > 1 else None
    deferred = [buffer.defer_gather(arrival) for buffer in buffers]
    if not all(deferred):
        comm_stream.join()
