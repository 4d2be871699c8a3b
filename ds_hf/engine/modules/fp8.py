"""Linear layers that multiply in fp8: forward and both products of backward, of any model, at every stage.

A product of the GPU reads both sides in 8 bits with a scale each: one for the whole side (``tensorwise``), or one for
each of its rows (``rowwise``). Activations and gradients are cast where they arise; in a compiled block that is part of
the kernel before. Parameters, their gradients and everything of the optimizer stay what they are.

Invariants
- A weight's fp8 copy is of the values that this process sees in forward, and so is the one that backward reads.
- Copies that are kept are of the present weights: a step, a checkpoint that is loaded and what is written into a weight
  end them. They are made when the model is called in training mode, with gradients or without; parts of it that are
  called by themselves after a step cast their weights at each use.
- In evaluation mode layers compute with their weights as they are, in 16 bits.

Sources: "FP8 Formats for Deep Learning" (arXiv:2209.05433): E4M3 forwards, E5M2 for gradients; scales from the present
maximum, as torchao's dynamic scaling has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hf.config.types.training import DsHfFp8Section
from ds_hf.engine.events import Observer
from ds_hf.engine.modules.linear_layers import head_of, is_router
from ds_hf.engine.zero.buffer import home_of, logical_shape
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.dtensor import Adopted
from ds_hf.engine.zero.hooks import Hook
from ds_hf.errors import ConfigError
from ds_hf.log import log_once, logger, warn_once

__all__ = ["Fp8Layers", "Fp8Linear", "Side", "adopt_wrapped", "attach", "cast", "multiply"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST_SCALE = 1e-12  # of a side that is all zeros
_MULTIPLE = 16  # what the products' inner dimensions, and rows of a weight, have to be multiples of


class Side(NamedTuple):
    """One side of a product.

    Attributes:
        values: ``[rows, inner]``, fp8.
        scale: fp32, ``[]`` or ``[rows, 1]``: what ``values`` are multiplied by.
    """

    values: Tensor
    scale: Tensor

    def t(self) -> Side:
        """``[inner, rows]``, contiguous; of a side with one scale."""
        return Side(self.values.t().contiguous(), self.scale)


def cast(x: Tensor, dtype: torch.dtype, *, rows: bool = False) -> Side:
    """``x``, ``[rows, inner]`` in 16 or 32 bits, in fp8 of ``dtype`` with one scale, or one for each of its rows.

    Rows' scales are powers of two, so that what fp8 holds exactly stays as it is.
    """
    most = torch.finfo(dtype).max
    peak = (x.abs().amax(dim=1, keepdim=True) if rows else x.abs().amax()).float().clamp(min=_LEAST_SCALE)
    scale = peak / most
    if rows:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return Side((x.float() / scale).clamp(-most, most).to(dtype), scale)


def multiply(a: Side, b: Side, dtype: torch.dtype, *, fast: bool = False, emulated: bool = False) -> Tensor:
    """``a @ b.t()``, ``[rows of a, rows of b]`` in ``dtype``.

    Args:
        fast: partial sums may be kept in fewer bits.
        emulated: by a product of 32 bits, on a device without one of 8.
    """
    if emulated:
        with torch.autocast(a.values.device.type, enabled=False):
            return ((a.values.float() @ b.values.float().t()) * a.scale * b.scale.t()).to(dtype)
    b_scale = b.scale.t() if b.scale.dim() else b.scale
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
    )


class Kept(NamedTuple):
    """A weight's copies in fp8, kept from call to call.

    Attributes:
        plain: ``[outer, inner]``.
        turned: ``[inner, outer]``.
        scale: fp32, ``[]``.
    """

    plain: Tensor
    turned: Tensor
    scale: Tensor


class _Product(torch.autograd.Function):
    """``x @ weight.t()`` in fp8.

    ``x`` is ``[rows, inner]``, ``weight`` ``[outer, inner]``; ``kept`` the weight's copies: as it is, and transposed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: Kept | None, by_rows: bool, emulated: bool) -> Tensor:
        side = cast(x, E4M3, rows=by_rows)
        own = cast(weight, E4M3, rows=by_rows) if kept is None else Side(kept.plain, kept.scale)
        if by_rows:  # along the other dimension scales are others
            ctx.save_for_backward(x, weight)
        else:
            second = weight if kept is None else kept.turned
            ctx.save_for_backward(side.values, side.scale, second, own.scale)
        ctx.by_rows, ctx.emulated, ctx.kept = by_rows, emulated, kept is not None
        return multiply(side, own, x.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad,) = grads
        grad_x = grad_weight = None
        if ctx.by_rows:
            x, weight = ctx.saved_tensors
            if ctx.needs_input_grad[0]:
                left, right = cast(grad, E4M3, rows=True), cast(weight.t().contiguous(), E4M3, rows=True)
                grad_x = multiply(left, right, grad.dtype, emulated=ctx.emulated)
            if ctx.needs_input_grad[1]:
                left, right = (cast(_padded(each).t().contiguous(), E4M3, rows=True) for each in (grad, x))
                grad_weight = multiply(left, right, grad.dtype, emulated=ctx.emulated)
            return grad_x, grad_weight, None, None, None
        x8, x_scale, weight, scale = ctx.saved_tensors
        side = cast(grad, E5M2)
        if ctx.needs_input_grad[0]:
            turned = weight if ctx.kept else _again(weight, scale).t().contiguous()
            grad_x = multiply(side, Side(turned, scale), grad.dtype, emulated=ctx.emulated)
        if ctx.needs_input_grad[1]:
            both = Side(_padded(side.values), side.scale).t(), Side(_padded(x8), x_scale).t()
            grad_weight = multiply(*both, grad.dtype, emulated=ctx.emulated)
        return grad_x, grad_weight, None, None, None


def _again(weight: Tensor, scale: Tensor) -> Tensor:
    """``weight`` in fp8, as forward had it: it saves the weight, which the engine has in memory anyway, and no copy."""
    most = torch.finfo(E4M3).max
    return (weight.float() / scale).clamp(-most, most).to(E4M3)


def _padded(x: Tensor) -> Tensor:
    """``x`` with rows of zeros at its end: their number is the inner dimension of a product."""
    missing = -x.shape[0] % _MULTIPLE
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


# -- layers ------------------------------------------------------------------------------------------------------------


class Fp8Linear(nn.Linear):
    """The class of a linear layer that multiplies in fp8. Compiled blocks share their code, as it is one class for all;
    a copy of such a layer, or a pickle, is an ordinary one."""

    _ds_by_rows: bool
    _ds_emulated: bool
    _ds_kept: Kept | None
    _ds_seen: tuple[int, int]  # what its copies are of
    _ds_owner: Fp8Layers

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        lowers = kind != "meta" and torch.is_autocast_enabled(kind)
        x = input.to(torch.get_autocast_dtype(kind)) if lowers else input
        if not self.training or x.numel() == 0 or x.dtype is not torch.bfloat16:
            return super().forward(input)
        kept = self._ds_kept
        if kept is not None and not torch.compiler.is_compiling() and self._ds_seen != _writes(self.weight):
            kept = None  # the whole model was not called since
        flat = x.reshape(-1, x.shape[-1])
        found: Tensor = _Product.apply(flat, self.weight, kept, self._ds_by_rows, self._ds_emulated)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            found = found + self.bias.to(found.dtype)
        return found.reshape(*x.shape[:-1], found.shape[-1])

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in _OWN}
        return _ordinary, (), state


def _ordinary() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


_OWN = ("_ds_by_rows", "_ds_emulated", "_ds_kept", "_ds_seen", "_ds_owner")


def _writes(weight: Tensor) -> tuple[int, int]:
    """Changes where something else than the engine's step wrote into ``weight``."""
    home = home_of(weight)
    return weight._version, 0 if home is None else home.buffer.kept_writes


class Fp8Layers(Observer):
    """The fp8 layers of one engine's model, until ``remove``.

    Args:
        keeps: weights' copies are kept between the micro-batches of a step.

    Attributes:
        layers: those that are.
        others: how many linear layers stay as they are, by reason.
    """

    def __init__(self, engine: Any, section: DsHfFp8Section, *, keeps: bool) -> None:
        self.layers: list[Fp8Linear] = []
        self.others: Counter[str] = Counter()
        for module, why in _linear_layers(engine.module, section):
            if why:
                self.others[why] += 1
                continue
            module.__class__ = Fp8Linear
            assert isinstance(module, Fp8Linear)
            module._ds_by_rows, module._ds_emulated = section.recipe == "rowwise", section.emulate
            module._ds_kept, module._ds_owner = None, self
            self.layers.append(module)
        self._reducer = engine.reducer
        self._memory: dict[Fp8Linear, Kept] | None = {} if engine.settings.ds_hf.capture else None  # graphs look there
        self._handle = engine.module.register_forward_pre_hook(Hook(self._begin), prepend=True) if keeps else None
        if keeps:
            engine.step_hooks.append(self._forget)
            engine.events.add(self)

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        of = next(self._own(), None)
        how = "" if of is None else f"{'rowwise' if of._ds_by_rows else 'tensorwise'}{', emulated' * of._ds_emulated}"
        return how and f"products in fp8, {how}"

    def _begin(self, module: nn.Module, args: Any) -> None:
        """The model is called."""
        if not module.training:
            return
        # before a step's first backward also what is written through ``.data`` is seen
        anew = self._memory is None and not self._reducer.accumulates
        for layer in self._own():
            seen = _writes(layer.weight)
            if anew or layer._ds_kept is None or layer._ds_seen != seen:
                layer._ds_kept = _copies_into((self._memory or {}).get(layer), layer.weight.detach())
                layer._ds_seen = seen
                if self._memory is not None:
                    self._memory[layer] = layer._ds_kept

    def _forget(self, engine: Any = None) -> None:
        """Copies are of weights that are no more."""
        for layer in self._own():
            layer._ds_kept = None

    def on_phase(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any] | None:
        if name != "load_checkpoint":
            return None
        after = ExitStack()
        after.callback(self._forget)
        return after

    def _own(self) -> Iterator[Fp8Linear]:
        """Layers that no later engine has taken."""
        return (layer for layer in self.layers if layer.__dict__.get("_ds_owner") is self)

    def remove(self) -> None:
        """Make the layers ordinary ones again."""
        if self._handle is not None:
            self._handle.remove()
        for layer in list(self._own()):
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            for name in _OWN:
                layer.__dict__.pop(name, None)
        self.layers.clear()
        self._memory = None


@torch.no_grad()
def _copies_into(kept: Kept | None, weight: Tensor) -> Kept:
    """The copies of ``weight``; in the memory of ``kept``, where a captured graph looks, if there is some."""
    make = _compiled_copies() if weight.is_cuda else _copies
    found = Kept(*make(weight))
    for old, new in zip(kept or (), found, strict=False):
        old.copy_(new)
    return kept or found


def _copies(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    side = cast(weight, E4M3)
    return side.values, side.values.t().contiguous(), side.scale


@cache
def _compiled_copies() -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """One pass over a weight for its maximum and one for both copies."""
    return torch.compile(_copies, dynamic=True)


def _linear_layers(model: nn.Module, section: DsHfFp8Section) -> Iterator[tuple[nn.Linear, str]]:
    """Each linear layer, and why it stays as it is, ``""`` if it does not."""
    heads = {head for m in model.modules() if (head := head_of(m)) is not None}
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not heads and named:
        heads = {named[-1][1]}
    for name, module in named:
        yield module, _why_not(name, module, module in heads, section)


def _why_not(name: str, module: nn.Linear, is_head: bool, section: DsHfFp8Section) -> str:
    shape = logical_shape(module.weight)
    if any(re.search(pattern, name) for pattern in section.exclude):
        return "excluded"
    if cut_of(module.weight) is not None:
        return "divided over processes (autotp_size)"
    if type(module) not in (nn.Linear, Fp8Linear):  # an earlier engine's, which are taken over
        return f"of class {type(module).__name__}"
    if is_head:
        return "the head"
    if is_router(name):
        return "a router"
    if not module.weight.requires_grad:
        return "frozen"
    if len(shape) != 2 or any(size % _MULTIPLE for size in shape):
        return f"a size is no multiple of {_MULTIPLE}"
    if shape.numel() < section.smallest:
        return f"smaller than {section.smallest:_} weights"
    home = home_of(module.weight)
    if (home.buffer.dtype if home is not None else module.weight.dtype) is torch.float16:
        return "in fp16"
    return ""


def adopt_wrapped(model: nn.Module, wrapper: type) -> Adopted:
    """Make ordinary parameters of weights in torchao's ``wrapper``, which casts them for FSDP2's gathers alone: those
    that it was made of, which optimizers know. torchao's layers cast ordinary ones as well."""
    new: dict[int, tuple[Any, nn.Parameter]] = {}
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        wrapped: dict[str, Any] = {name: param for name, param in held.items() if isinstance(param, wrapper)}
        for name, param in wrapped.items():
            inner = param._tensor
            own = inner if isinstance(inner, nn.Parameter) else nn.Parameter(inner, param.requires_grad)
            held[name] = new.setdefault(id(param), (param, own))[1]
    return Adopted(new)


def _lacks(device: torch.device) -> str:
    """Why ``device`` cannot multiply in fp8, ``""`` if it can."""
    if device.type != "cuda":
        return f"{device.type} has no products of 8 bits"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return f"{name} has no products of 8 bits (compute capability {major}.{minor}; 8.9 is needed)"
    return ""


def attach(engine: Any) -> None:
    """Let the linear layers of an engine's model multiply in fp8 from now on, if the configuration says so.

    Raises:
        ConfigError: no layer can.
    """
    section: DsHfFp8Section = engine.settings.ds_hf.fp8
    lacks = _lacks(engine.device)
    if lacks and not section.emulate:
        if engine.mesh.world.rank == 0:
            warn_once(
                f"fp8 is left out, layers compute in 16 bits: {lacks}. To see on this machine what fp8 does to a loss, "
                'slowly, set "ds_hf": {"fp8": {"emulate": true}}'
            )
        return
    keeps = engine.batch.accumulation_steps > 1 if section.keep_weights == "auto" else section.keep_weights
    sharded = any(unit.sharded for unit in engine.units)
    layers = Fp8Layers(engine, section, keeps=keeps and not sharded and section.recipe == "tensorwise")
    engine.hooks.handles.append(layers)
    others = ", ".join(f"{count} {why}" for why, count in layers.others.most_common())
    if not layers.layers:
        raise ConfigError(
            f"fp8: no linear layer of {type(engine.module).__name__} can multiply in it ({others or 'there is none'})",
            "/ds_hf/fp8",
        )
    if engine.mesh.world.rank == 0:
        rest = f"; in 16 bits: {others}" if others else ""
        logger.info("fp8, %s: %d linear layers%s", section.recipe, len(layers.layers), rest)
        if not engine.settings.ds_hf.compile and engine.device.type == "cuda":
            log_once(
                "fp8 without compiled blocks: each cast is a kernel of its own, which takes what products gain. Add "
                '"ds_hf": {"compile": "blocks"}'
            )
