"""The operators ``torch.ops.ds_hf.*``: schema, fake kernel, checks, and the choice of who computes.

The functions here have the signatures of ``reference.py``. They check every argument before anything is written, then
call the CUDA kernels, the CPU library or the reference, with one logged line naming why when it is the last.

Eager calls go straight to the implementation, because torch's dispatch of a Python operator over lists costs 10 to 100
times a kernel launch. Under ``torch.compile`` and with fake tensors they go through the registered operator.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ds_hf.dtypes import name_of
from ds_hf.engine.ops import reference
from ds_hf.engine.ops.split_master import LOW
from ds_hf.log import log_once

__all__ = [
    "OPS",
    "adagrad_",
    "adam_",
    "choose",
    "clip_control",
    "define",
    "lamb_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "norm_control",
    "sgd_",
    "squared_norm",
    "sum_parts_",
]

F = TypeVar("F", bound=Callable[..., Any])

_MASTER = (torch.float32, torch.bfloat16)
_GRADIENT = (torch.float32, torch.bfloat16, torch.float16)
_FLOATING = (*_GRADIENT, torch.float64)
_MOMENTS = ("exp_avgs", "exp_avg_sqs", "sums", "momentum_buffers")
_MAY_BE_EMPTY = ("outs", "momentum_buffers")
_SPLITTABLE = ("adam_", "adagrad_", "lion_", "sgd_")  # whose outs may be the low bits of masters


@dataclass(frozen=True)
class Op:
    """One operator.

    Attributes:
        name: as in ``torch.ops.ds_hf``.
        lists: its arguments that are lists of tensors, one entry a parameter, in order.
        schema: of the operator; ``lr`` is split into a number and an optional tensor, ``rate``.
    """

    name: str
    lists: tuple[str, ...]
    schema: str

    @functools.cached_property
    def written(self) -> tuple[str, ...]:
        """The lists that it writes."""
        return tuple(name for name in self.lists if f"!)[] {name}" in self.schema)

    @functools.cached_property
    def rule(self) -> bool:
        """Whether it takes a ``scale_and_skip`` and, but for LAMB's first pass, a rate."""
        return _END in self.schema


_ADAM = "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs"
_LAMB = "float beta1, float beta2, float eps, bool eps_inside_sqrt, float weight_decay"
_TRUST = "bool bias_correction, float min_coeff, float max_coeff"
_CLIP = "float scale, float max_norm, bool checked"
_END = "Tensor? scale_and_skip, Tensor? rate, *"

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "adam_",
            ("params", "grads", "exp_avgs", "exp_avg_sqs", "outs", "steps"),
            f"({_ADAM}, Tensor(d!)[] outs, Tensor[] steps, {_END}, float lr, float beta1, float beta2, float eps, "
            "float weight_decay, bool decoupled=True, bool bias_correction=True, int? seed=None) -> ()",
        ),
        Op(
            "lion_",
            ("params", "grads", "exp_avgs", "outs"),
            f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] outs, {_END}, "
            "float lr, float beta1, float beta2, float weight_decay, int? seed=None) -> ()",
        ),
        Op(
            "adagrad_",
            ("params", "grads", "sums", "outs", "steps"),
            f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] outs, Tensor[] steps, {_END}, "
            "float lr, float lr_decay, float eps, float weight_decay, int? seed=None) -> ()",
        ),
        Op(
            "sgd_",
            ("params", "grads", "momentum_buffers", "outs"),
            f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] outs, {_END}, "
            "float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool first, "
            "int? seed=None) -> ()",
        ),
        Op(
            "lamb_",
            ("params", "grads", "exp_avgs", "exp_avg_sqs", "outs", "steps"),
            f"({_ADAM}, Tensor(d!)[] outs, Tensor[] steps, {_END}, float lr, {_LAMB}, {_TRUST}) -> ()",
        ),
        Op(
            "lamb_moments_",
            ("params", "grads", "exp_avgs", "exp_avg_sqs"),
            "(Tensor[] params, Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, "
            f"{_END}, {_LAMB}) -> Tensor",
        ),
        Op(
            "lamb_apply_",
            ("params", "exp_avgs", "exp_avg_sqs", "outs", "steps"),
            "(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(b!)[] outs, Tensor[] steps, "
            f"Tensor norms, {_END}, float lr, {_LAMB}, {_TRUST}) -> ()",
        ),
        Op("squared_norm", ("tensors",), "(Tensor[] tensors) -> Tensor"),
        Op("norm_control", ("tensors",), f"(Tensor[] tensors, *, {_CLIP}) -> Tensor"),
        Op("clip_control", ("squares",), f"(Tensor[] squares, *, {_CLIP}) -> Tensor"),
        Op(  # of single tensors, so by itself below
            "sum_parts_",
            (),
            "(Tensor(a!) out, Tensor[] mine, Tensor? before, Tensor rows, *, int[] cuts, int place, "
            "float factor) -> ()",
        ),
    )
}


def choose(device: torch.device, dtypes: Collection[torch.dtype] = (torch.float32,)) -> tuple[ModuleType, str | None]:
    """The module that computes tensors of ``dtypes`` on ``device``, and why it is the reference if it is."""
    if device.type not in ("cuda", "cpu"):
        return reference, f"ds_hf has no kernels for the device {device.type}"
    try:
        backend = _backend(device.type)
    except ModuleNotFoundError as error:
        return reference, str(error)
    reason = cast("str | None", backend.available())
    takes = _GRADIENT if device.type == "cpu" else (*_GRADIENT, LOW)
    if reason is None and (other := [dtype for dtype in dtypes if dtype not in takes]):
        reason = f"the kernels do not take {name_of(other[0])}"
    return (reference, reason) if reason else (backend, None)


@functools.cache
def _backend(device_type: str) -> ModuleType:
    """``ops.cuda`` or ``ops.cpu``, imported when a tensor on such a device comes along."""
    return importlib.import_module(f"ds_hf.engine.ops.{device_type}")


# -- calls --------------------------------------------------------------------------------------------------------


def _run(op: Op, args: Sequence[Any], scalars: dict[str, Any]) -> Any:
    """Check, choose, compute. ``args`` are positional as in ``reference.py``: lists, perhaps norms, scale_and_skip."""
    lists = args[: len(op.lists)]
    scale_and_skip = args[-1] if len(args) > len(op.lists) else None
    tensors = _check(op, lists, scale_and_skip, scalars.get("lr"))
    if tensors == 0:
        return getattr(reference, op.name)(*args, **scalars)
    first = lists[0][0]
    backend, reason = choose(first.device, _dtypes(op, lists))
    if reason:
        log_once(f"ds_hf::{op.name} on {first.device.type} runs in plain torch: {reason}")
    for name, tensors_of in zip(op.lists, lists, strict=True):
        if name in op.written:
            torch.autograd.graph.increment_version(tensors_of)
    return getattr(backend, op.name)(*args, **scalars)


def _dtypes(op: Op, lists: Sequence[Sequence[Tensor]]) -> set[torch.dtype]:
    """All dtypes but those of step counters; masters in fp16 are the reference's, so they count as another."""
    found = {t.dtype for name, tensors in zip(op.lists, lists, strict=True) if name != "steps" for t in tensors}
    narrow = any(
        t.dtype is torch.float16
        for name, tensors in zip(op.lists, lists, strict=True)
        if name == "params" or name in _MOMENTS
        for t in tensors
    )
    return found | {torch.float64} if narrow else found


def _check(op: Op, lists: Sequence[Sequence[Tensor]], scale_and_skip: Tensor | None, lr: Any) -> int:
    """Refuse what a kernel would read or write wrongly; returns the number of entries.

    Raises:
        ValueError: lists of different lengths, tensors of other sizes, on other devices, not contiguous.
        TypeError: dtypes that the operator does not take.
    """
    count = len(lists[0])
    if count == 0 and all(len(tensors) == 0 for tensors in lists):
        return 0
    device = lists[0][0].device if count else None
    for name, tensors in zip(op.lists, lists, strict=True):
        if len(tensors) != count and not (name in _MAY_BE_EMPTY and not tensors):
            raise ValueError(f"{op.name}: {name} has {len(tensors)} tensors and {op.lists[0]} has {count}")
        if tensors:
            _check_list(op, name, tensors, lists[0], device)
    if op.name == "clip_control":
        for index, square in enumerate(lists[0]):
            _check_small(op, f"squares[{index}]", square, 1, device)
    if scale_and_skip is not None:
        _check_small(op, "scale_and_skip", scale_and_skip, 2, device)
    if isinstance(lr, Tensor):
        _check_small(op, "lr", lr, 1, device)
    return count


def _check_list(
    op: Op, name: str, tensors: Sequence[Tensor], params: Sequence[Tensor], device: torch.device | None
) -> None:
    dtype = tensors[0].dtype
    if name == "outs" and dtype is LOW and op.name in _SPLITTABLE:
        if params[0].dtype is not torch.bfloat16:
            raise TypeError(f"{op.name}: outs are low bits of masters, whose high ones, params, must be bfloat16")
    elif dtype not in _FLOATING:
        raise TypeError(f"{op.name}: {name} are {name_of(dtype)}, not floating-point tensors")
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"{op.name}: {name}[{index}] is on {tensor.device} and {op.lists[0]}[0] on {device}")
        if tensor.dtype != dtype:
            raise TypeError(
                f"{op.name}: {name}[{index}] is {name_of(tensor.dtype)} and {name}[0] {name_of(dtype)}; "
                "one call takes one dtype a list"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{op.name}: {name}[{index}] is not contiguous; call .contiguous() or pass a flat view")
        if name == "steps":
            if tensor.numel() != 1 or dtype is not torch.float32:
                raise ValueError(f"{op.name}: steps[{index}] must be one fp32 number, not {_describe(tensor)}")
        elif tensor.numel() != params[index].numel():
            raise ValueError(
                f"{op.name}: {name}[{index}] has {tensor.numel()} elements and {op.lists[0]}[{index}] "
                f"{params[index].numel()}"
            )


def _check_small(op: Op, name: str, tensor: Tensor, numel: int, device: torch.device | None) -> None:
    if tensor.numel() != numel or tensor.dtype is not torch.float32 or tensor.device != device:
        raise ValueError(f"{op.name}: {name} must be fp32 of {numel} elements on {device}, not {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{name_of(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"


# -- torch.library ------------------------------------------------------------------------------------------------


def _registered(op: Op) -> Callable[..., Any]:
    """The function behind ``torch.ops.ds_hf.<name>``, with ``lr`` and ``rate`` as the schema has them."""

    def kernel(*args: Any, **scalars: Any) -> Any:
        if not op.rule:
            return _run(op, args, scalars)
        *rest, rate = args
        if rate is not None:
            scalars["lr"] = rate
        return _run(op, rest, scalars)

    return kernel


def _fake(op: Op) -> Callable[..., Any]:
    def result(*args: Any, **_: Any) -> Any:
        if not op.rule:
            shape = () if op.name == "squared_norm" else (3,)
            return torch.empty(shape, dtype=torch.float32, device=args[0][0].device)
        if op.name == "lamb_moments_":
            return torch.empty((len(args[0]), 2), dtype=torch.float32, device=args[0][0].device)
        return None

    return result


def define(
    name: str, schema: str, kernel: Callable[..., Any], written: Sequence[str], fake: Callable[..., Any] | None = None
) -> None:
    """Register ``torch.ops.ds_hf.<name>``; ``fake`` gives what it returns, by default nothing."""
    custom = torch.library.custom_op(f"ds_hf::{name}", kernel, mutates_args=written, schema=schema)
    custom.register_fake(fake or (lambda *args, **scalars: None))


for _op in OPS.values():
    if _op.lists:
        define(_op.name, _op.schema, _registered(_op), _op.written, _fake(_op))


def _public(fn: F) -> F:
    op = OPS[fn.__name__]
    kernel = getattr(torch.ops.ds_hf, op.name)
    count = len(op.lists)

    @functools.wraps(fn)
    def call(*args: Any, **scalars: Any) -> Any:
        if not torch.compiler.is_compiling() and all(
            type(tensor) in (Tensor, nn.Parameter) for tensors in args[:count] for tensor in tensors[:1]
        ):
            return _run(op, args, scalars)
        lists = [list(tensors) for tensors in args[:count]]
        if len(args) == count:
            return kernel(*lists, **scalars)
        lr = scalars.pop("lr", None)
        rate = lr if isinstance(lr, Tensor) else None
        if lr is not None:
            scalars["lr"] = 0.0 if rate is not None else lr
        return kernel(*lists, *args[count:], rate, **scalars)

    return cast(F, call)


adam_ = _public(reference.adam_)
lion_ = _public(reference.lion_)
adagrad_ = _public(reference.adagrad_)
sgd_ = _public(reference.sgd_)
lamb_ = _public(reference.lamb_)
lamb_moments_ = _public(reference.lamb_moments_)
lamb_apply_ = _public(reference.lamb_apply_)
squared_norm = _public(reference.squared_norm)
norm_control = _public(reference.norm_control)
clip_control = _public(reference.clip_control)


# -- the sum ------------------------------------------------------------------------------------------------------


def _run_sum(
    out: Tensor,
    mine: Sequence[Tensor],
    before: Tensor | None,
    rows: Tensor,
    *,
    cuts: Sequence[int],
    place: int,
    factor: float,
) -> None:
    """``reference.sum_parts_``, checked.

    Raises:
        ValueError: a cut is not within its tensors; tensors on several devices, or not contiguous.
        TypeError: parts of several dtypes.
    """
    flat = [out] if before is None else [out, before]
    for name, tensors in (("out and before", flat), ("mine", mine), ("rows", [rows])):
        for tensor in tensors:
            if tensor.device != out.device or not tensor.is_contiguous():
                raise ValueError(f"sum_parts_: {name} must be contiguous and on {out.device}, not {_describe(tensor)}")
            if not tensor.is_floating_point() or (tensors is mine and tensor.dtype != rows.dtype):
                raise TypeError(f"sum_parts_: {name} are {_describe(tensor)} where rows are {_describe(rows)}")
    if rows.dim() != 2 or any(tensor.dim() != 1 or tensor.numel() != out.numel() for tensor in flat):
        raise ValueError("sum_parts_: rows must be [ranks - 1, numel], out and before flat and of one length")
    if not 0 <= place <= rows.shape[0]:
        raise ValueError(f"sum_parts_: place {place} is not one of {rows.shape[0] + 1} ranks")
    room, row = out.numel(), rows.shape[1]
    for cut in zip(*[iter(cuts)] * 5, strict=True):
        index, begin, to, at, length = cut
        inside = min(cut) >= 0 and index < len(mine) and begin + length <= mine[index].numel()
        if not inside or to + length > room or at + length > row:
            raise ValueError(f"sum_parts_: the cut {cut} is not within its tensors")
    backend, reason = choose(out.device, {out.dtype, rows.dtype, *(tensor.dtype for tensor in flat)})
    if reason:
        log_once(f"ds_hf::sum_parts_ on {out.device.type} runs in plain torch: {reason}")
    torch.autograd.graph.increment_version(out)
    backend.sum_parts_(out, mine, before, rows, cuts=cuts, place=place, factor=factor)


define("sum_parts_", OPS["sum_parts_"].schema, _run_sum, ("out",))


def _public_sum(fn: F) -> F:
    @functools.wraps(fn)
    def call(out: Tensor, mine: Sequence[Tensor], *args: Any, **scalars: Any) -> None:
        eager = not torch.compiler.is_compiling() and type(out) is Tensor
        (_run_sum if eager else torch.ops.ds_hf.sum_parts_)(out, list(mine), *args, **scalars)

    return cast(F, call)


sum_parts_ = _public_sum(reference.sum_parts_)
