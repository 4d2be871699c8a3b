"""The names by which scripts know a stage-3 parameter: ``ds_id``, ``ds_shape``, ``ds_tensor``, ``all_gather()``, ...

They are attributes of the parameter, since transformers, accelerate and PEFT look for them there. ``ds_tensor`` is a
view of what this rank keeps of the parameter: writing to it, in place, changes the parameter. Of parameters in files it
has the shape and no values, as everything at rest there. After ``initialize`` the ranks' parts of a parameter are not
of equal length, and may be empty: a whole block is cut, not each of its parameters. A small parameter that stays whole
(``ds_persist``) has the names too, for scripts ask every parameter of a stage-3 model; its ``ds_tensor`` is all of it.

One more is for checkpoints, at every stage: which parameters the script has resized, so that no file has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.layout import FlatLayout, Slot

__all__ = ["is_resized", "mark", "mark_newcomers", "mark_resized", "unmark"]

_RESIZED = "_ds_resized"


def mark_resized(param: Tensor) -> None:
    """The script has given ``param`` another size, and values that the files of the model do not have."""
    setattr(param, _RESIZED, True)


def is_resized(param: Tensor) -> bool:
    """Whether what is saved without frozen parameters has ``param`` all the same: nothing else does."""
    return hasattr(param, _RESIZED)


class _Buffer(Protocol):
    """A flat buffer as the names see it."""

    axis: Axis
    layout: FlatLayout
    sharded: bool

    @property
    def full(self) -> Tensor: ...
    @property
    def shard(self) -> Tensor: ...
    @property
    def stays(self) -> bool: ...
    def gather_exactly(self) -> None: ...
    def write_back(self) -> None: ...
    def release(self) -> None: ...


class _Method:
    """A function of a parameter, as an attribute of it. Copies and pickles as ``None``."""

    __slots__ = ("name", "param")

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param = name, weakref.ref(param)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        param = self.param()
        assert param is not None
        return _METHODS[self.name](param, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _nothing, ()


class _Part(Tensor):
    """A tensor that pickles as ``None``: the file of a pickled model would have the shards in it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # what is computed from it is an ordinary tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[()]]:
        return _nothing, ()


class _Gathered:
    """What ``all_gather_coalesced`` gives: the parameters are there already."""

    def wait(self, **kwargs: Any) -> None:
        """They are there."""


def _nothing() -> None:
    return None


def _buffer(param: Tensor) -> _Buffer:
    return param._ds_home.buffer  # type: ignore[attr-defined, no-any-return]


def _all_gather(param: nn.Parameter, param_list: Sequence[nn.Parameter] | None = None, **kwargs: Any) -> None:
    """Make it (or the list) available until ``partition()``. Collective."""
    for each in [param] if param_list is None else param_list:
        _buffer(each).gather_exactly()


def _all_gather_coalesced(param: nn.Parameter, params: Sequence[nn.Parameter], **kwargs: Any) -> _Gathered:
    """The same, for DeepSpeed's asynchronous form."""
    _all_gather(param, list(params))
    return _Gathered()


def _partition(
    param: nn.Parameter, param_list: Sequence[nn.Parameter] | None = None, has_been_updated: bool = False, **kwargs: Any
) -> None:
    """Give the whole values back; ``has_been_updated``: keep what was written to them on this rank."""
    for each in [param] if param_list is None else param_list:
        if has_been_updated:
            _buffer(each).write_back()
        _buffer(each).release()


def _partition_numel(param: nn.Parameter) -> int:
    """Elements of ``ds_tensor``."""
    return int(param.ds_tensor.numel())  # type: ignore[attr-defined]


def _aligned_size(param: nn.Parameter) -> int:
    """Elements of as many equal parts as there are ranks."""
    world = _buffer(param).axis.world_size
    return -(-param.ds_numel // world) * world  # type: ignore[attr-defined, no-any-return]


def _padding_size(param: nn.Parameter) -> int:
    """Elements of those parts that the parameter does not fill."""
    return _aligned_size(param) - param.ds_numel  # type: ignore[attr-defined, no-any-return]


def _summary(param: nn.Parameter, **kwargs: Any) -> dict[str, Any]:
    """What it is, for a log."""
    names = {"id": "ds_id", "status": "ds_status", "numel": "numel", "ds_numel": "ds_numel", "ds_shape": "ds_shape"}
    found = {key: getattr(param, name) for key, name in names.items()}
    found["numel"] = param.numel()
    return {
        **found, "status": found["status"].name, "shape": tuple(param.shape), "ds_shape": tuple(found["ds_shape"]),
        "requires_grad": param.requires_grad, "ds_tensor.shape": tuple(param.ds_tensor.shape),  # type: ignore[attr-defined]
    }  # fmt: skip


def _getstate(param: nn.Parameter) -> dict[str, Any]:
    """What torch pickles beside the values: a pickle of a gathered parameter is that of an ordinary one."""
    return {name: value for name, value in param.__dict__.items() if name not in _OURS}


_METHODS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "__getstate__": _getstate,
    "aligned_size": _aligned_size,
    "ds_summary": _summary,
    "padding_size": _padding_size,
    "partition": _partition,
    "partition_numel": _partition_numel,
}
_ATTRIBUTES = (
    "ds_active_sub_modules", "ds_id", "ds_numel", "ds_persist", "ds_shape", "ds_status", "ds_tensor",
    "is_external_param",
)  # fmt: skip
_OURS = {"_ds_home", *_ATTRIBUTES, *_METHODS}


def mark(param: Any, buffer: _Buffer, slot: Slot) -> None:
    """Give ``param``, whose values lie in ``buffer``, the names. The buffer says what its ``ds_status`` is."""
    param.ds_shape = slot.shape
    param.ds_numel = slot.numel
    param.ds_active_sub_modules = set()
    param.ds_persist = not buffer.sharded
    param.is_external_param = False
    param.ds_tensor = _part(buffer, slot)
    for name in _METHODS:
        setattr(param, name, _Method(name, param))


def mark_newcomers(params: Iterable[Any]) -> None:
    """Give those which joined a sharded model later, as a second adapter does, what TRL clears on all of its parameters
    around a generation; of any shape and dtype."""
    for param in params:
        if isinstance(param, nn.Parameter) and not hasattr(param, "ds_active_sub_modules"):
            param.ds_active_sub_modules = set()  # type: ignore[attr-defined]


def unmark(param: Tensor) -> None:
    """Take them away."""
    for name in (*_ATTRIBUTES, *_METHODS):
        param.__dict__.pop(name, None)


def _part(buffer: _Buffer, slot: Slot) -> Tensor:
    """This rank's part, flat; with its padding where the parameter is alone in the buffer."""
    if not buffer.sharded:
        return slot.of(buffer.full).view(-1).as_subclass(_Part)
    layout, shard = buffer.layout, buffer.shard.detach()
    if not buffer.stays:  # another memory each time that it is read, see ``offload.blocks``
        nothing = float("nan") if shard.is_floating_point() else 0
        shard = torch.full((1,), nothing, dtype=shard.dtype).expand(layout.shard_numel)
    if slot.index < 0 or layout.numel - slot.numel < layout.world_size:  # bytes of quantized weights, or alone
        return shard.as_subclass(_Part)
    low, high = layout.shard_range(buffer.axis.rank)
    start, end = max(slot.offset, low), min(slot.end, high)
    found = slice(start - low, end - low) if end > start else slice(0, 0)
    return shard[found].as_subclass(_Part)
