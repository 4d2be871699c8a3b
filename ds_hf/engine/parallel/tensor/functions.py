"""What a tensor-parallel model computes between processes: functions of a tensor, each with its gradient.

==============  =================================  =================================
function        forward                            backward
==============  =================================  =================================
``copy_to``     the tensor itself                  the sum over the axis
``copy_behind`` the tensor itself                  the same of what lies behind a place of its last dimension
``reduce_from`` the sum over the axis              the gradient itself
``gather_last`` all parts of the last dimension    this process's part
``split_last``  this process's part of it          all parts
==============  =================================  =================================

``copy_to`` and ``reduce_from`` are f and g of Megatron-LM (Shoeybi et al. 2019, section 3). Collectives run where the
model computes and are noted in the log of the axis. Compiled code gets torch's functional collectives instead, which
it can trace and which are not noted; tensors without values (meta) pass through.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis

__all__ = ["SIDES", "Place", "copy_behind", "copy_to", "gather_last", "reduce_from", "split_last"]


class Place:
    """Where a cut layer is: what its functions need to know.

    Attributes:
        axis: the processes that share the layer.
        name: path of the module.
        copied: the last input of ``copy_to`` and its result, for the next layer of the same input.
    """

    __slots__ = ("axis", "backward", "copied", "forward", "name")

    def __init__(self, axis: Axis, name: str, copied: list[Any]) -> None:
        self.axis, self.name, self.copied = axis, name, copied
        self.forward, self.backward = f"activations of {name}", f"gradients of the input of {name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:  # a pickle has no processes
        return _nowhere, ()


def _nowhere() -> None:
    return None


def copy_to(x: Tensor, place: Place, *, owns_gradient: bool = False) -> Tensor:
    """The input of a layer that is cut along its outputs.

    Layers of one input (q, k and v; gate and up) that follow each other share one copy, so that backward adds their
    gradients up first and sums over the axis once.

    Args:
        owns_gradient: nothing else holds the gradient that backward brings: it may be summed in place.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return _apply(_Copy, x, place, False) if x.requires_grad else x
    known = place.copied[0]
    if known is not None and known[0] is x and known[2] == owns_gradient:
        return cast(Tensor, known[1])
    result = _apply(_Copy, x, place, owns_gradient)
    place.copied[0] = (x, result, owns_gradient)
    return result


def copy_behind(x: Tensor, first: int, place: Place) -> Tensor:
    """``x``, of which cut layers get ``[..., first:]`` as their input, and what follows sees to the rest."""
    return _apply(_CopyBehind, x, first, place) if x.requires_grad else x


def reduce_from(x: Tensor, place: Place, *, in_place: bool = False) -> Tensor:
    """The sum of the parts that the processes have of a layer's output; ``in_place``: nothing else holds ``x``."""
    if not torch.compiler.is_compiling():
        place.copied[0] = None
    return _apply(_Reduce, x, place, in_place and not torch.compiler.is_compiling())


def gather_last(x: Tensor, place: Place) -> Tensor:
    """``[..., n]`` of each process as ``[..., n * processes]``, the same on all."""
    if not torch.compiler.is_compiling():
        place.copied[0] = None
    return _apply(_Gather, x, place)


def split_last(x: Tensor, place: Place) -> Tensor:
    """This process's part of the last dimension of ``x``, which is the same on all."""
    return _apply(_Split, x, place)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def _sum(x: Tensor, place: Place, what: str) -> Tensor:
    if x.is_meta:
        return x
    if torch.compiler.is_compiling():
        return cast(Tensor, functional.all_reduce(x, "sum", _group(place.axis)))
    return collectives.all_reduce_sum(x, place.axis, what)


def _all_parts(x: Tensor, place: Place, what: str) -> Tensor:
    size = place.axis.world_size
    x = x.contiguous()
    if x.is_meta:
        parts = x.new_empty(size, *x.shape)
    elif torch.compiler.is_compiling():
        parts = functional.all_gather_tensor(x.unsqueeze(0), 0, _group(place.axis))
    else:
        parts = x.new_empty(size, *x.shape)
        collectives.all_gather(parts.view(-1), x.view(-1), place.axis, what)
    return parts.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])


def _own_part(x: Tensor, place: Place) -> Tensor:
    length = x.shape[-1] // place.axis.world_size
    return x.narrow(-1, place.axis.rank * length, length).contiguous()


def _group(axis: Axis) -> dist.ProcessGroup:
    group = dist.group.WORLD if axis.group is None else axis.group
    assert group is not None
    return group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place, owns_gradient: bool) -> Tensor:
        ctx.place, ctx.owns = place, owns_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous() if ctx.owns else grad.clone(memory_format=torch.contiguous_format)
        return _sum(grad, ctx.place, ctx.place.backward), None, None


class _CopyBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, place: Place) -> Tensor:
        ctx.first, ctx.place = first, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        behind = grad[..., ctx.first :].clone(memory_format=torch.contiguous_format)
        return torch.cat([grad[..., : ctx.first], _sum(behind, ctx.place, ctx.place.backward)], -1), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place, in_place: bool) -> Tensor:
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        return _sum(x, place, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _all_parts(x, place, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_part(grad, ctx.place), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _own_part(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_parts(grad, ctx.place, ctx.place.backward), None


# On which side of a function its input is: the same on all processes, or a part of it on each.
SIDES: dict[type, str] = {_Copy: "whole", _CopyBehind: "whole", _Reduce: "part", _Gather: "part", _Split: "whole"}
