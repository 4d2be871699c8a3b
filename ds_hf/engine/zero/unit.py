"""Units: the parameters that are communicated together, the modules and calls that need them, and which comes next.

Invariant: each parameter of the model belongs to exactly one unit; inside a unit there is one flat buffer for each
(dtype, trainable, dtype of reductions) - parameter groups of the optimizer lie one after another in it - and every
buffer of a unit is gathered or none.

Gathered ahead is the next unit forwards and the one before in backward, in the order of the first step. That depends
only on the units that are used and on the order on which all ranks agreed, so ranks that use the same units issue the
same collectives. At most one unit beyond those in use is gathered, and none where that would exceed
``stage3_max_live_parameters``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ds_hf.engine.zero.buffer import FlatBuffer

__all__ = ["Prefetch", "Unit", "UnitCall", "beside_levels", "in_backward", "on_gradient", "tensors_in"]

_PLAIN = {type(None), bool, int, float, str}  # what most arguments are that are no tensors
_NESTS = (list, tuple, set)  # isinstance takes a tuple faster than a union
_INPUT_OF = "_ds_input_of"  # on a view of a call's input: a module that returns its input did not compute it


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: path of the module in the model, ``""`` for the root.
        module: the module whose forward needs the unit.
        params: distinct parameters, in layout order.
        whole: small parameters of the whole model that stay gathered; only the root has some.
        owners: further modules that hold some of the parameters directly and may be called on their own.
        joined: further blocks of the unit, in the order of the model: as a rule they are called one after another.
        buffers: trainable and frozen flat buffers.
        leaf: ranks may use different parameters of it: it holds experts, or the user marked it as a leaf.
        depth: nested calls now in progress among ``modules``.
        awaited: calls since the last backward whose own backward will end; less than 0 when forwards ran inside it.
        open_calls: calls whose backward has begun and not ended.
        loading: ``load_state_dict`` of a module gathers the unit.
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter]
    whole: list[nn.Parameter] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    joined: list[nn.Module] = field(default_factory=list)
    buffers: list[FlatBuffer] = field(default_factory=list)
    leaf: bool = False
    depth: int = 0
    awaited: int = 0
    open_calls: set[UnitCall] = field(default_factory=set)
    loading: bool = False

    @property
    def modules(self) -> list[nn.Module]:
        """Those whose calls need the unit."""
        return [self.module, *self.owners, *self.joined]

    @property
    def label(self) -> str:
        """For logs."""
        return f"{self.name} and {len(self.joined)} more" if self.joined else self.name

    @property
    def sharded(self) -> bool:
        return any(buffer.sharded for buffer in self.buffers)

    def gather(self) -> None:
        """Make the unit's parameters available. Collective when they are sharded."""
        for buffer in self.buffers:
            buffer.gather()

    def start_gather(self) -> bool:
        """Begin to make the unit's parameters available, unless they are. Collective when they are sharded."""
        began = [buffer.start_gather() for buffer in self.buffers]  # all of them
        return any(began)

    def release(self) -> None:
        """Give the gathered parameters' memory back."""
        for buffer in self.buffers:
            buffer.release()

    @property
    def numel(self) -> int:
        return sum(slot.numel for buffer in self.buffers for slot in buffer.layout.slots)


class Prefetch:
    """Gathers ahead once an order is known.

    Args:
        enabled: ``stage3_prefetch_bucket_size`` is not 0.
        max_live: elements that may be gathered at once (``stage3_max_live_parameters``).
    """

    def __init__(self, enabled: bool = True, max_live: int | None = None) -> None:
        self.enabled = enabled
        self.max_live = max_live
        self.last: Unit | None = None  # backward begins with it: not worth releasing before
        self._next: dict[Unit, Unit] = {}
        self._before: dict[Unit, Unit] = {}
        self._ahead: set[Unit] = set()

    def follow(self, units: Sequence[Unit]) -> None:
        """The units are used in this order in a forward."""
        sharded = [unit for unit in units if unit.sharded and unit.name]
        self.last = sharded[-1] if sharded else None
        if not self.enabled:
            return
        pairs = [(a, b) for a, b in pairwise(sharded) if self._fits(a, b)]
        self._next = dict(pairs)
        self._before = {b: a for a, b in pairs}
        if sharded and units[0] is not sharded[0]:
            self._next[units[0]] = sharded[0]  # the root comes first

    def _fits(self, a: Unit, b: Unit) -> bool:
        return self.max_live is None or a.numel + b.numel <= self.max_live

    def forward(self, unit: Unit) -> None:
        """``unit`` has been gathered for its forward."""
        self._start(unit, self._next.get(unit))

    def backward(self, unit: Unit) -> None:
        """``unit`` has been gathered for its backward."""
        self._start(unit, self._before.get(unit))

    def _start(self, unit: Unit, other: Unit | None) -> None:
        self._ahead.discard(unit)
        if other is not None and other.start_gather():
            self._ahead.add(other)

    def drop(self) -> None:
        """A forward without backward, or a backward, is over: give back what was gathered and not used."""
        while self._ahead:
            unit = self._ahead.pop()
            if not unit.depth:
                unit.release()


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: recomputation under checkpointing is forward inside it."""
    return bool(torch._C._current_graph_task_id() != -1)


def beside_levels() -> bool:
    """Whether a transform of ``torch.func`` or a derivative in forward mode is open: then what a module computes has
    graphs that no hook on its output sees, those of what ``vmap`` wraps and those of tangents."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """All tensors, of any shape and dtype, in a nest of lists, tuples, mappings, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _NESTS):
        for item in value:
            yield from tensors_in(item, depth)
    elif hasattr(value, "values") and callable(value.values) and hasattr(value, "keys"):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), depth)
    elif depth < 2 and not isinstance(value, type | nn.Module) and not callable(value):
        for item in getattr(value, "__dict__", {}).values():
            yield from tensors_in(item, depth + 1)
        slots = getattr(type(value), "__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            yield from tensors_in(getattr(value, slot, None), depth + 1)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` when the gradient of ``tensor``, of any shape and dtype, has been computed."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


class UnitCall:
    """One call of a unit's module: its backward is over when the gradients of all its inputs are computed.

    Args:
        over: called when backward is over with it.
        partly: of a block that is joined to another one: when that one's backward is over, the unit's is.

    Attributes:
        within: the call of that other one; then it does not matter when this call's backward is over.
        later: calls of guests that began after this one was over.
    """

    def __init__(self, unit: Unit, over: Callable[[UnitCall], None], *, partly: bool = False) -> None:
        self.unit = unit
        self.over = over
        self.partly = partly
        self.within: UnitCall | None = None
        self.inputs = 0
        self.pending: set[int] = set()
        self.later: list[UnitCall] = []

    def ends_before(self, former: UnitCall) -> None:
        """Everything of this call comes after ``former``; so backward is over with it when it reaches that one."""
        self.inputs = 1
        former.later.append(self)

    def begin(self, trained: int) -> None:
        """Backward reached the call; so many buffers of the unit have gradients.

        Of inputs without gradients nothing tells that it is over but the end of backward: what trains inside may be in
        another unit (small weights that stay gathered), and frozen weights are needed until it has its gradient.
        """
        self.pending = set(range(self.inputs))
        if not self.inputs and len(self.unit.buffers) > trained:
            self.pending.add(-1)
        if self.pending or self.within is not None:
            self.unit.open_calls.add(self.within or self)

    def watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs, those that need a gradient as views: the gradient of a view is complete when this call's backward
        is, whatever else uses the tensor (an encoder's states go into every block of the decoder)."""
        return tuple(map(self._watched, args)), {key: self._watched(value) for key, value in kwargs.items()}

    def _watched(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if not isinstance(value, Tensor):
            for tensor in tensors_in(value):
                if tensor.requires_grad:
                    self._watch(tensor)
            return value
        if not value.requires_grad:
            return value
        view = value.view_as(value)
        setattr(view, _INPUT_OF, self)
        self._watch(view)
        return view

    def _watch(self, tensor: Tensor) -> None:
        on_gradient(tensor, partial(self.reached_input, self.inputs))
        self.inputs += 1

    def reached_input(self, key: int, grad: Tensor) -> None:
        """The gradient of an input, of its shape and dtype, has been computed."""
        if torch.is_grad_enabled():  # with create_graph=True
            return
        self.pending.discard(key)
        if not self.pending:
            self.unit.open_calls.discard(self)
            self.over(self)

    def has_input(self, tensor: Tensor) -> bool:
        """Whether it, of any shape and dtype, is what the module got, and not what it computed."""
        return getattr(tensor, _INPUT_OF, None) is self
