"""What experts compute for routes that are sorted by expert: two grouped products and what lies between them.

transformers' own ``grouped_mm`` forward sorts routes, gathers their tokens, and puts what comes out back into order;
the backward of both is a sum over repeated indices. Here that has been done, by functions whose backward is a gather.
Adapters of the weights are two small products more. Modules of other kinds, dtypes without a grouped product and the
implementations that a user has chosen (``experts_implementation``) compute with the module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ds_hf.engine.ops import rows
from ds_hf.engine.parallel.experts.adapters import adapted, adapters_of, whole_delta

__all__ = ["InFewBits", "compute_by_own", "compute_routes", "reads_blocks", "values_in_place", "weigh"]

_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
_multiply: Any = getattr(torch.nn.functional, "grouped_mm", None)


def compute_routes(
    module: nn.Module,
    own: Callable[..., Tensor],
    x: Tensor,
    experts: Tensor,
    scale: Tensor,
    ends: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """What the experts give for routes, times their weights: ``[routes, width]``.

    Args:
        own: the module's own forward.
        x: ``[routes, width]``: the token of each route; experts: ``[routes]``, ascending; scale: ``[routes, 1]``.
        ends: int32 ``[experts]``: where the routes of each end.
    """
    if not _multiplies(module, x):
        return compute_by_own(module, own, x, experts, scale, *args, **kwargs)
    parts: Any = module
    names = ("gate_up_proj" if parts.has_gate else "up_proj", "down_proj")
    y = _linear(x, parts, names[0], ends, experts)
    y = _gated(parts, y) if parts.has_gate else parts.act_fn(y)
    y = _linear(y, parts, names[1], ends, experts)
    if getattr(parts, "has_post_expert_norm", False):  # not in transformers 5.17
        y = parts.post_expert_norm(y)
    return weigh(y, scale) if y.dtype == x.dtype else (y * scale).to(x.dtype)


def weigh(y: Tensor, scale: Tensor) -> Tensor:
    """``y * scale`` in the dtype of ``y``, ``[routes, width]``: what experts gave and its weights, ``[routes, 1]``."""
    if torch.compiler.is_compiling():  # which makes one kernel of it and its neighbours; torch 2.11 lost gradients of
        return (y * scale).to(y.dtype)  # the function below
    return cast(Tensor, _Weigh.apply(y, scale))  # type: ignore[no-untyped-call]


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor) -> Tensor:
        y, scale = y.contiguous(), scale.contiguous()
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, scale)
        return rows.weigh(y, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        y, scale = ctx.saved_tensors
        grad = grad.contiguous()
        return (rows.weigh(grad, scale), None) if y is None else rows.weigh_backward(grad, y, scale)


def _gated(module: Any, x: Tensor) -> Tensor:
    """Its own gate; the usual one, silu(gates) * ups, by one kernel."""
    usual = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    act = getattr(module, "act_fn", None)
    silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"  # transformers'
    if usual and silu and getattr(module, "is_concatenated", False):
        return cast(Tensor, _Gate.apply(x))  # type: ignore[no-untyped-call]
    return cast(Tensor, module._apply_gate(x))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return rows.gate(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return rows.gate_backward(grad.contiguous(), *ctx.saved_tensors)


def _linear(x: Tensor, module: Any, name: str, ends: Tensor, experts: Tensor) -> Tensor:
    x = x.to(_kind(module, name)[0])
    stack = _stack(module, name)
    weight = getattr(module, name) if stack is None else module._parameters[name]
    if stack is None:
        y = _product(x, weight if module.is_transposed else weight.mT, ends)
    elif len(x) < len(weight) and not torch.is_grad_enabled():  # a token that is generated reads few experts
        few = stack.values(weight[experts])
        y = torch.bmm(x[:, None], few if module.is_transposed else few.mT)[:, 0]
    else:
        y = _Packed.apply(x, weight, stack, module.is_transposed, ends)  # type: ignore[no-untyped-call]
    for left, right, scaling in adapters_of(module, name):
        first, second = (left, right) if module.is_transposed else (right.mT, left.mT)
        y = torch.add(y, _low_rank(x, first, second, ends), alpha=scaling)
    return _add_bias(y, getattr(module, f"{name}_bias"), experts, ends) if module.has_bias else y


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x @ weight`` for the routes of each expert, ``[routes, n]``; ``weight``: ``[experts, k, n]``."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _Product.apply(x, weight, ends))  # type: ignore[no-untyped-call]
    return cast(Tensor, _multiply(x, weight, offs=ends))


class _Product(torch.autograd.Function):
    """As torch has it, but for the gradient of the weight in compiled graphs: see ``rows.grouped_outer``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return cast(Tensor, _multiply(x, weight, offs=ends))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad, of_x, of_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(grad, weight.mT, offs=ends)
        if ctx.needs_input_grad[1]:
            by_columns = weight.stride(-2) == 1
            of_weight = rows.grouped_outer(grad, x, ends).mT if by_columns else rows.grouped_outer(x, grad, ends)
        return of_x, of_weight, None


def _add_bias(y: Tensor, bias: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    return cast(Tensor, _AddBias.apply(y, bias, experts, ends))  # type: ignore[no-untyped-call]


class _AddBias(torch.autograd.Function):
    """The bias of its expert to each route. The sums of its gradient are a product with ones, which the backward of
    indexing takes ten times as long for on a GPU."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.dtype = bias.dtype
        return y + bias[experts]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        grad = grad.contiguous()
        ones = grad.new_ones(len(grad), 16 // grad.element_size())  # as few columns as the product knows
        found = rows.grouped_outer(ones, grad, ctx.saved_tensors[0])
        return grad, found[:, 0].to(ctx.dtype), None, None


class InFewBits(Protocol):
    """A parameter that is stored in another form than plain numbers: frozen experts in few bits."""

    dtype: torch.dtype
    shape: tuple[int, int]

    def values(self, packed: Tensor) -> Tensor: ...


def reads_blocks(module: nn.Module) -> bool:
    """Whether weights of ``module`` rest in few bits."""
    return bool(module.__dict__.get("_ds_stacks"))


def _stack(module: nn.Module, name: str) -> InFewBits | None:
    found: InFewBits | None = module.__dict__.get("_ds_stacks", {}).get(name)
    return found


def _kind(module: nn.Module, name: str) -> tuple[torch.dtype, tuple[int, int]]:
    """The dtype in which a weight multiplies, and the shape of one expert's."""
    stack, weight = _stack(module, name), module._parameters[name]
    assert weight is not None
    return (weight.dtype, (weight.shape[-2], weight.shape[-1])) if stack is None else (stack.dtype, stack.shape)


class _Packed(torch.autograd.Function):
    """The grouped product of a frozen weight that is read here, and again for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, stack: InFewBits, transposed: bool, ends: Tensor) -> Tensor:
        ctx.save_for_backward(packed, ends)
        ctx.stack, ctx.transposed = stack, transposed
        weight = stack.values(packed)
        return cast(Tensor, _multiply(x, weight if transposed else weight.mT, offs=ends))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        packed, ends = ctx.saved_tensors
        weight = ctx.stack.values(packed).to(grad.dtype)
        return _multiply(grad.contiguous(), weight.mT if ctx.transposed else weight, offs=ends), None, None, None, None


def _low_rank(x: Tensor, first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """``x @ first @ second``, each ``[experts, ...]``, in the dtype of ``x``; ranks that the product does not know are
    filled with zeros."""
    missing = -first.shape[-1] % (16 // x.element_size())
    first, second = (nn.functional.pad(each, (0, missing)) for each in (first.to(x.dtype), second.mT.to(x.dtype)))
    return _product(_product(x, first, ends), second.contiguous().mT, ends)


def compute_by_own(
    module: nn.Module,
    own: Callable[..., Tensor],
    x: Tensor,
    experts: Tensor,
    scale: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``compute_routes`` by ``own``. With adapters, or weights in few bits, it reads weights that are computed for it;
    they are computed again for backward, and not kept."""
    active = {name: adapters_of(module, name) for name in module._parameters} if adapted(module) else {}
    read = [name for name in module._parameters if active.get(name) or _stack(module, name) is not None]
    if not read:
        return own(x, experts[:, None], scale, *args, **kwargs)

    def with_values(x: Tensor, scale: Tensor) -> Tensor:
        values = {name: whole_delta(getattr(module, name), active.get(name, ())) for name in read}
        with values_in_place(module, values):
            return own(x, experts[:, None], scale, *args, **kwargs)

    found: Tensor = checkpoint(with_values, x, scale, use_reentrant=False, preserve_rng_state=False)
    return found


@contextmanager
def values_in_place(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """``module.name`` gives ``values[name]`` inside, and the parameters stay what they are."""
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]


def _multiplies(module: nn.Module, x: Tensor) -> bool:
    """Whether the module is of transformers' kind, its implementation the grouped product, and that knows its dtype."""
    if getattr(getattr(module, "config", None), "_experts_implementation", None) != "grouped_mm" or _multiply is None:
        return False
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return False
    if module._parameters.get("down_proj") is None or not len(x):
        return False
    dtype, shape = _kind(module, "down_proj")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if torch.compiler.is_compiling() and dtype is not torch.bfloat16:  # graphs know no other
        return False
    return all(length * dtype.itemsize % 16 == 0 for length in (*shape, x.shape[-1])) and not (
        x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)
    )
