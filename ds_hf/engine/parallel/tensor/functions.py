"""What a tensor-parallel model computes between processes: functions of a tensor, each with its gradient.

=================  =================================  =================================
function           forward                            backward
=================  =================================  =================================
``copy_to``        the tensor itself                  the sum over the axis
``copy_behind``    the tensor itself                  the same of what lies behind a place of its last dimension
``reduce_from``    the sum over the axis              the gradient itself
``gather_last``    all parts of the last dimension    this process's part
``gather_heads``   the same                           this process's part of the sum over the axis
``split_last``     this process's part of it          all parts
``gather_tokens``  the tokens of all                  this process's tokens
``split_tokens``   this process's tokens              those of all
=================  =================================  =================================

``copy_to`` and ``reduce_from`` are f and g of Megatron-LM (Shoeybi et al. 2019, section 3). Where tokens are divided
between cut layers (Korthikanti et al. 2022, section 4.2.2) they do less: the sum over the axis is left of this
process's tokens alone. Collectives run where the model computes and are noted in the log of the axis. Compiled code
gets torch's functional collectives instead, which it can trace and which are not noted; tensors without values (meta)
pass through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis

__all__ = [
    "SIDES",
    "DividedTokens",
    "Place",
    "copy_behind",
    "copy_to",
    "gather_heads",
    "gather_last",
    "gather_tokens",
    "pass_on",
    "reduce_from",
    "split_last",
    "split_tokens",
]


class DividedTokens:
    """Of blocks whose tokens are divided between cut layers: what they compute at the moment.

    Attributes:
        shape: of whole hidden states without their last dimension, while such a block computes with a part of the
            tokens; ``None`` elsewhere.
        gathered: the last part, what ``gather_tokens`` made of it, and what ``copy_to`` did.
    """

    __slots__ = ("gathered", "shape")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self.gathered: tuple[Tensor, Tensor, Tensor | None] | None = None


class Place:
    """Where a cut layer is: what its functions need to know.

    Attributes:
        axis: the processes that share the layer.
        name: path of the module.
        copied: the last input of ``copy_to`` and its result, for the next layer of the same input.
        tokens: of the blocks it is in, if their tokens are divided ...
        scatters: ... and ``reduce_from`` leaves this process's tokens of the sum.
    """

    __slots__ = ("axis", "backward", "copied", "forward", "name", "scatters", "tokens")

    def __init__(self, axis: Axis, name: str, copied: list[Any], tokens: DividedTokens | None = None) -> None:
        self.axis, self.name, self.copied, self.tokens, self.scatters = axis, name, copied, tokens, False
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
    tokens = place.tokens
    if tokens is not None and tokens.gathered is not None and tokens.gathered[1] is x and x.requires_grad:
        part, _, result = tokens.gathered
        if result is None:
            result = _apply(_OfGathered, part, x.detach(), place)
            tokens.gathered = (part, x, result)
        return result
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
    if place.scatters and place.tokens is not None and place.tokens.shape is not None:
        return _apply(_SumOfTokens, x, place)
    return _apply(_Reduce, x, place, in_place and not torch.compiler.is_compiling())


def gather_last(x: Tensor, place: Place) -> Tensor:
    """``[..., n]`` of each process as ``[..., n * processes]``, the same on all."""
    if not torch.compiler.is_compiling():
        place.copied[0] = None
    return _apply(_Gather, x, place)


def gather_heads(x: Tensor, place: Place) -> Tensor:
    """``[..., n]`` of each process as ``[..., n * processes]``, with which each goes on computing something else."""
    return _apply(_GatherHeads, x, place)


def split_last(x: Tensor, place: Place) -> Tensor:
    """This process's part of the last dimension of ``x``, which is the same on all."""
    return _apply(_Split, x, place)


def gather_tokens(part: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
    """Of this process's tokens, as ``split_tokens`` gives them, those of all, ``[*shape, hidden]``.

    Args:
        shape: the same on all processes.
    """
    return _apply(_GatherTokens, part, place, shape)


def split_tokens(x: Tensor, place: Place) -> Tensor:
    """This process's tokens of ``x``, ``[..., hidden]``, which is the same on all: ``[1, ..., tokens, hidden]`` with as
    many dimensions. Where they do not divide, the last ones are zeros."""
    return _apply(_SplitTokens, x, place)


def pass_on(part: Tensor, told: Callable[[Tensor], None]) -> Tensor:
    """``part``, this process's tokens; ``told`` gets its gradient, before others are added to it."""
    return _apply(_PassOn, part, told)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def _makes_graph() -> bool:
    """Whether a backward that runs is to be differentiated (``create_graph=True``): by the function whose forward it
    is, as each one's backward is another's forward."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


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


def _tokens_of_all(part: Tensor, place: Place, shape: tuple[int, ...], what: str) -> Tensor:
    hidden, size = part.shape[-1], place.axis.world_size
    rows = part.reshape(-1, hidden).contiguous()
    if rows.is_meta:
        found = rows.new_empty(size * rows.shape[0], hidden)
    elif torch.compiler.is_compiling():
        found = functional.all_gather_tensor(rows, 0, _group(place.axis))
    else:
        found = rows.new_empty(size * rows.shape[0], hidden)
        collectives.all_gather(found.view(-1), rows.view(-1), place.axis, what)
    return found[: math.prod(shape)].view(*shape, hidden)


def _own_tokens(x: Tensor, place: Place) -> Tensor:
    rows, each = _padded_tokens(x, place)
    return _like_tokens(rows[place.axis.rank * each : (place.axis.rank + 1) * each], x)


def _sum_of_own_tokens(x: Tensor, place: Place, what: str) -> Tensor:
    rows, each = _padded_tokens(x, place)
    if rows.is_meta:
        found = rows.new_empty(each, rows.shape[1])
    elif torch.compiler.is_compiling():
        found = functional.reduce_scatter_tensor(rows, "sum", 0, _group(place.axis))
    else:
        own = collectives.reduce_gradient(
            rows.view(-1), place.axis, scatter=True, scale_before=1.0, scale_after=1.0, what=what
        )
        found = own.view(each, -1)
    return _like_tokens(found, x)


def _padded_tokens(x: Tensor, place: Place) -> tuple[Tensor, int]:
    """``[tokens, hidden]`` of a whole, with zeros behind it, and how many are a process's."""
    rows, size = x.reshape(-1, x.shape[-1]).contiguous(), place.axis.world_size
    each = -(-rows.shape[0] // size)
    return F.pad(rows, (0, 0, 0, each * size - rows.shape[0])) if rows.shape[0] % size else rows, each


def _like_tokens(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(*[1] * (x.dim() - 2), *rows.shape)


def _own_part(x: Tensor, place: Place) -> Tensor:
    length = x.shape[-1] // place.axis.world_size
    return x.narrow(-1, place.axis.rank * length, length).contiguous()


def _own_part_of_sum(x: Tensor, place: Place) -> Tensor:
    return _own_part(_sum(x.clone(memory_format=torch.contiguous_format), place, place.backward), place)


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
        if _makes_graph():
            return _apply(_Reduce, grad, ctx.place, False), None, None
        grad = grad.contiguous() if ctx.owns else grad.clone(memory_format=torch.contiguous_format)
        return _sum(grad, ctx.place, ctx.place.backward), None, None


class _CopyBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, place: Place) -> Tensor:
        ctx.first, ctx.place = first, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if _makes_graph():
            summed = _apply(_Reduce, grad[..., ctx.first :], ctx.place, False)
            return torch.cat([grad[..., : ctx.first], summed], -1), None, None
        behind = grad[..., ctx.first :].clone(memory_format=torch.contiguous_format)
        return torch.cat([grad[..., : ctx.first], _sum(behind, ctx.place, ctx.place.backward)], -1), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place, in_place: bool) -> Tensor:
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        ctx.place = place
        return _sum(x, place, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Copy, grad, ctx.place, False) if _makes_graph() else grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _all_parts(x, place, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _apply(_Split, grad, ctx.place) if _makes_graph() else _own_part(grad, ctx.place), None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _all_parts(x, place, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if _makes_graph():
            return _apply(_PartOfSum, grad, ctx.place), None
        return _own_part_of_sum(grad, ctx.place), None


class _PartOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _own_part_of_sum(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if _makes_graph():
            return _apply(_GatherHeads, grad, ctx.place), None
        return _all_parts(grad, ctx.place, ctx.place.forward), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _own_part(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if _makes_graph():
            return _apply(_Gather, grad, ctx.place), None
        return _all_parts(grad, ctx.place, ctx.place.backward), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
        ctx.place = place
        return _tokens_of_all(part, place, shape, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_SplitTokens, grad, ctx.place) if _makes_graph() else _own_tokens(grad, ctx.place), None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place, ctx.shape = place, tuple(x.shape[:-1])
        return _own_tokens(x, place).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if _makes_graph():
            return _apply(_GatherTokens, grad, ctx.place, ctx.shape), None
        return _tokens_of_all(grad, ctx.place, ctx.shape, ctx.place.backward), None


class _OfGathered(torch.autograd.Function):
    """``whole``, which was gathered of ``part``, as the input of layers that are cut by their outputs."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if _makes_graph():
            return _apply(_SumOfTokens, grad, ctx.place), None, None
        return _sum_of_own_tokens(grad, ctx.place, ctx.place.backward), None, None


class _SumOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place, ctx.shape = place, tuple(x.shape[:-1])
        return _sum_of_own_tokens(x, place, place.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found = _tokens_of_all(grad.detach(), ctx.place, ctx.shape, ctx.place.backward)
        return _apply(_OfGathered, grad, found, ctx.place) if _makes_graph() else found, None


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, told: Callable[[Tensor], None]) -> Tensor:
        ctx.told = told
        return part.detach()  # no view for autograd, so what gets it may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.told(grad)
        return grad, None


# On which side of a function its input is: the same on all processes, or a part of it on each.
# Of divided tokens each process has a part, too.
SIDES: dict[type, str] = {
    _Copy: "whole",
    _CopyBehind: "whole",
    _Reduce: "part",
    _Gather: "part",
    _GatherHeads: "part",
    _PartOfSum: "part",
    _Split: "whole",
    _GatherTokens: "part",
    _SplitTokens: "whole",
    _OfGathered: "part",
    _SumOfTokens: "part",
    _PassOn: "part",
}
