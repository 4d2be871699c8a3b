"""PEFT's LoRA layers, computed together where they read the same input: q, k and v; gate and up.

The model and PEFT stay as they are. ``forward`` of each layer has a stand-in for as long as the engine lives: the first
of a family that is called computes those after it as well (``adapter_products.py``), and they hand out what is there
when they are called with the very same tensor. What an MLP gives its last layer is not kept where autograd's graph says
that it is ``silu`` or ``gelu`` of what one layer just gave, times what another gave (``gated.py``). Whether a layer is
plain LoRA at all is looked at in each call, so what PEFT or the user changes (merged or disabled adapters, another one,
hooks, what trains) finds PEFT's own ``forward``.

Invariants
- What is handed out was computed of the tensor, weights, scaling and modes that the call has; else it is dropped.
- Which layers are computed together follows from names and, at a step's end, from calls: forward and a recomputation of
  it do the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ds_hf.engine.events import Observer
from ds_hf.engine.modules.adapter_products import Operands, SharedCall, adapted_products
from ds_hf.engine.modules.compiling import StandIn
from ds_hf.engine.modules.gated import Half, activation_between
from ds_hf.engine.modules.quantized.layers import QuantizedWeight, computes_blocks
from ds_hf.engine.ops.rows import Activation
from ds_hf.engine.zero.at_rest import use
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.unit import in_backward
from ds_hf.log import log_once

__all__ = ["AdaptedLayer", "FusedAdapters", "attach"]

# Names of layers that read one input, in the order in which blocks call them.
_FAMILIES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_CROSS = ("cross", "encoder_attn", "encdec")  # their queries are of another input
_LAYERS = ("Linear", "Linear4bit")  # PEFT's, by name: peft need not be there
_REPLACED = "its forward was replaced"
_CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


class _Terms(NamedTuple):
    """What one layer computes with in a call."""

    base: nn.Module
    weight: Tensor
    bias: Tensor | None
    first: Tensor
    second: Tensor
    scaling: float
    dropout: nn.Module | None
    magnitude: Tensor | None

    def states(self) -> tuple[int | bool | None, ...]:
        """What changes where they are written in place, or begin or cease to train."""
        bias, first, second, magnitude = self.bias, self.first, self.second, self.magnitude
        return (
            self.weight._version,
            first._version,
            second._version,
            first.requires_grad,
            second.requires_grad,
            None if bias is None else bias._version,
            None if magnitude is None else magnitude._version,
        )

    def same(self, other: _Terms) -> bool:
        return (
            self.weight is other.weight
            and self.first is other.first
            and self.second is other.second
            and self.scaling == other.scaling
            and self.bias is other.bias
            and self.dropout is other.dropout
            and self.magnitude is other.magnitude
        )


class _Modes(NamedTuple):
    """What besides its layers decides what a call gives."""

    version: int
    needs_grad: bool
    grad: bool
    inference: bool
    cast: torch.dtype | None


class _Ready(NamedTuple):
    """A layer's output, computed when another one was called."""

    x: Tensor
    modes: _Modes
    terms: _Terms
    states: tuple[int | bool | None, ...]
    out: Tensor


class AdaptedLayer:
    """In the place of ``forward`` of one of PEFT's layers.

    Attributes:
        after: those of its family that are called after it.
        halves: the layers whose product is its input, ``is_half``: it is one of those, ``made``: what it gave last.
        beside: what is in the MLP with it, whose hooks may see what is not to be kept.
        counts: memory is predicted, and operations are watched for that.
        missed: what it computed for those was of no use to one of them.
        said: reasons that were told, of all layers.
    """

    def __init__(
        self, name: str, module: nn.Module, base: nn.Module, read: Callable[..., Tensor], said: set[str]
    ) -> None:
        self.said = said
        self.name, self.module, self.base, self.kind = name, module, base, type(base)
        self.method = type(module).forward
        self.read, self.is_quantized = read, read is not _whole and read is not _whole_transposed
        self.after: list[AdaptedLayer] = []
        self.halves: tuple[AdaptedLayer, AdaptedLayer] | None = None
        self.is_half = self.counts = False
        self.beside: tuple[nn.Module, ...] = ()
        self.made: Half | None = None
        self.missed = False
        self.ready: _Ready | None = None
        self.kept: Tensor | None = None

    # -- as a source of values --------------------------------------------------------------------------------------

    def values(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``[outputs, inputs]``; those of few bits that a recomputation kept serve once."""
        kept, self.kept = self.kept, None
        return kept if kept is not None and kept.dtype is dtype else self.read(self.base, weight, dtype)

    def keep(self, values: Tensor) -> None:
        if self.is_quantized:
            self.kept = values

    def forget(self) -> None:
        """What a forward or backward that ended early has left."""
        self.ready = self.kept = self.made = None

    # -- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler sees PEFT's operations, and fuses them itself
            return self.own(x, *args, **kwargs)
        halves = None if self.halves is None else self._take(*self.halves)
        ready, self.ready = self.ready, None
        known = ready is not None and ready.x is x
        terms = None if args or kwargs or not (known or self.counts or _is_plain(x)) else self.terms()
        modes = None if terms is None else self.modes(x, terms)
        if terms is None or modes is None:
            return self.own(x, *args, **kwargs)
        if ready is not None:
            if known and ready.modes == modes and ready.terms.same(terms) and ready.states == terms.states():
                return self._handed(ready.out)
            self.missed = self.missed or not in_backward()
        return self._handed(self._compute(x, terms, modes, halves))

    def _handed(self, out: Tensor) -> Tensor:
        if self.is_half and out.requires_grad:
            self.made = Half.of(out)
        return out

    @staticmethod
    def _take(gate: AdaptedLayer, up: AdaptedLayer) -> tuple[Half, Half] | None:
        """What both have given; they hold it no longer."""
        found = gate.made, up.made
        gate.made = up.made = None
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def _compute(self, x: Tensor, terms: _Terms, modes: _Modes, halves: tuple[Half, Half] | None) -> Tensor:
        layers, of_each = [self], [terms]
        for layer in self.after:
            if layer.ready is not None and not in_backward():
                layer.missed = True
            layer.ready = layer.kept = None
            others = layer.terms()
            if others is None or layer.module._forward_pre_hooks or layer.modes(x, others) != modes:
                continue
            if others.first.dtype is terms.first.dtype or modes.cast is not None:
                layers.append(layer)
                of_each.append(others)
        dtype = x.dtype if modes.cast is None else modes.cast
        small = terms.first.dtype if modes.cast is None else modes.cast
        call = SharedCall(layers, [each.scaling for each in of_each], dtype, small, modes.grad and in_backward())
        self.kept = None
        dropped = [None if each.dropout is None else each.dropout(x.to(each.first.dtype)) for each in of_each]
        _, weights, biases, firsts, seconds, _, _, magnitudes = zip(*of_each, strict=True)
        operands = Operands(weights, biases, firsts, seconds, dropped, magnitudes)
        use(chain(weights, biases, firsts, seconds, magnitudes))
        act = None if halves is None or x.dtype is not dtype else self._act(x, terms, *halves)
        if halves is not None and act is not None:
            both, call = (halves[0].out, halves[1].out), call._replace(act=act)
            outs = adapted_products(call, x, operands, both)
        else:
            outs = adapted_products(call, x if x.dtype is dtype else x.to(dtype), operands)
        for layer, each, out in zip(layers[1:], of_each[1:], outs[1:], strict=True):
            layer.ready = _Ready(x, modes, each, each.states(), out)
        return outs[0]

    def _act(self, x: Tensor, terms: _Terms, gate: Half, up: Half) -> Activation | None:
        """Of the gate, where the input is its product with up, and A alone asks for it."""
        if self.after or terms.dropout is not None or not terms.first.requires_grad:
            return None
        if any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in self.beside):
            return None
        return activation_between(x, gate, up)

    def modes(self, x: Tensor, terms: _Terms) -> _Modes | None:
        """``None`` where dtypes are for PEFT."""
        kind = x.device.type
        if not x.is_meta and torch.is_autocast_enabled(kind):
            cast = torch.get_autocast_dtype(kind)
            if x.dtype not in _CAST_BY_AUTOCAST or cast not in _CAST_BY_AUTOCAST:
                return None
        else:
            cast = None
        if not self.is_quantized:
            if cast is None and terms.weight.dtype is not x.dtype:
                return None
        elif (own := _computes_in(terms.base, terms.weight)) is None or own is not (cast or x.dtype):
            return None
        if terms.magnitude is not None and (cast is not None or terms.first.dtype is not x.dtype):
            self._leave("DoRA's norm is taken in another dtype")
            return None
        if terms.first.dtype is not terms.second.dtype or (self.is_bitsandbytes and cast not in (None, x.dtype)):
            return None
        return _Modes(x._version, x.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast)

    @property
    def is_bitsandbytes(self) -> bool:
        return self.read is _of_bitsandbytes

    def own(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, x, *args, **kwargs)

    def terms(self) -> _Terms | None:
        """What the layer computes with now, ``None`` where that is not plain LoRA, or others have to see it."""
        replaced = type(self.module).forward is not self.method
        found = _REPLACED if replaced else _terms(self.module.__dict__, self.kind)
        if isinstance(found, str):
            self._leave(found)
            return None
        return found

    def _leave(self, why: str) -> None:
        """Say it once for all layers."""
        if why and why not in self.said:
            self.said.add(why)
            log_once(f"{self.name}, and layers like it, are computed by PEFT: {why}")


def _terms(own: Any, kind: type) -> _Terms | str:
    """Or why PEFT computes: empty where that is what was asked for."""
    if own["_disable_adapters"] or own["merged_adapters"]:
        return ""
    modules, name = own["_modules"], own["_active_adapter"]
    firsts = modules["lora_A"]._modules
    if not isinstance(name, str):
        active = [each for each in name if each in firsts]
        if len(active) != 1:
            return f"{len(active)} adapters are active" if active else ""
        name = active[0]
    if name not in firsts:
        return ""
    base: Any
    base, first, second = modules["base_layer"], firsts[name], modules["lora_B"]._modules[name]
    dropout: Any = modules["lora_dropout"]._modules[name]
    dora: Any = modules["lora_magnitude_vector"]._modules.get(name)
    if _is_variant(own, name):
        return "its adapter is a variant of LoRA"
    classes: tuple[Any, ...] = type(base), type(first), type(second)
    if classes != (kind, nn.Linear, nn.Linear):
        return "other layers took the places of its own"
    if not own.get("cast_input_dtype_enabled", True):
        return "its input is not to be cast"
    for module in (base, first, second, dropout) if dora is None else (base, first, second, dropout, dora):
        found: dict[str, Any] = module.__dict__
        if (
            found["_forward_hooks"]
            or found["_forward_pre_hooks"]
            or found["_backward_hooks"]
            or found["_backward_pre_hooks"]
            or "forward" in found
        ):
            return "there are hooks inside of it"
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    if weight.requires_grad:
        return "its base trains"
    if second._parameters["bias"] is not None:
        return "its adapter has a bias"
    drops = dropout.training and type(dropout) is not nn.Identity and getattr(dropout, "p", 1.0) > 0
    magnitude = None if dora is None else dora._parameters["weight"]
    if magnitude is not None and drops:
        return "DoRA multiplies what dropout leaves of the input"
    small = first._parameters["weight"], second._parameters["weight"]
    return _Terms(base, weight, bias, small[0], small[1], own["scaling"][name], dropout if drops else None, magnitude)


def _is_variant(own: dict[str, Any], adapter: str) -> bool:
    variant = own.get("lora_variant", {}).get(adapter)
    return variant is not None and type(variant).__name__ != "DoraLinearVariant"


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether ``forward`` in a layer's ``__dict__`` is none, its class's, as a copy has it, or another engine's."""
    of_class = getattr(forward, "__func__", None) is type(module).forward
    return forward is None or of_class or isinstance(getattr(forward, "call", None), AdaptedLayer)


def _is_of(method: Any, package: str) -> bool:
    """Whether a method is the package's own: a subclass, or a patch of the class, may compute something else."""
    return method.__module__.startswith(package) and not hasattr(method, "__wrapped__")


def _is_plain(x: Any) -> bool:
    """Whether a function of ours may compute with it: nothing looks at, or stands for, the operations."""
    return (
        type(x) is Tensor
        and not x.is_meta
        and x.dim() > 0
        and not x.is_inference()
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not (torch._C._len_torch_function_stack() and _functions_are_watched())
        and not _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _functions_are_watched() -> bool:
    """By more than what gives new tensors their device."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


# -- bases ---------------------------------------------------------------------------------------------------------


def _whole(base: nn.Module, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if weight.dtype is dtype else weight.to(dtype)


def _whole_transposed(base: nn.Module, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).t()


def _of_blocks(base: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    values: Tensor = base._ds_format.unpack(weight, base._ds_shape, base._ds_dtype).to(dtype)
    return values.t() if base._ds_transposed else values


def _of_bitsandbytes(base: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    state = base._parameters["weight"].quant_state
    values: Tensor = import_module("bitsandbytes.functional").dequantize_4bit(weight, state)
    return values.to(dtype)


def _computes_in(base: Any, weight: Any) -> torch.dtype | None:
    """The dtype in which a base of few bits takes its input."""
    if isinstance(base, QuantizedWeight):
        return base._ds_dtype
    state = getattr(weight, "quant_state", None)
    if state is None or len(state.shape) != 2 or getattr(state, "packing_format_for_cpu", False):
        return None
    return base.compute_dtype  # type: ignore[no-any-return]


def _reader(base: Any) -> Callable[..., Tensor] | str:
    """What gives the values of a base's weight, or why PEFT computes."""
    kind = type(base)
    weight = base._parameters.get("weight")
    if isinstance(base, QuantizedWeight):
        return _of_blocks if computes_blocks(base) else f"its base is a {kind.__name__}"
    if kind.__module__.startswith("bitsandbytes.") and kind.__name__ in ("Linear4bit", "LinearNF4", "LinearFP4"):
        return _of_bitsandbytes
    if weight is None or is_packed(weight):
        return f"the weight of its base is a {type(weight).__name__}"
    if kind.forward is nn.Linear.forward and _is_of(kind.forward, "torch."):
        return _whole
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return _whole_transposed
    return f"its base is a {kind.__name__}"


# -- the pass over a model ---------------------------------------------------------------------------------------------


class FusedAdapters(Observer):
    """The stand-ins of one engine.

    Args:
        counts: memory is predicted, of tensors without values.

    Attributes:
        layers: those with a stand-in. left: why others have none, and how many.
    """

    def __init__(self, model: nn.Module, counts: bool = False) -> None:
        self.layers: list[AdaptedLayer] = []
        self.left: Counter[str] = Counter()
        self._said: set[str] = set()
        for name, module in model.named_modules():
            by_child = {
                key: found for key, child in module.named_children() if (found := self._layer(f"{name}.{key}", child))
            }
            self.layers += by_child.values()
            for family in _families(name):
                together = [by_child[key] for key in family if key in by_child]
                for place, layer in enumerate(together):
                    width = layer.module.in_features  # keys of another width are of another input
                    layer.after = [each for each in together[place + 1 :] if each.module.in_features == width]
            for family in _GATED:
                if all(key in by_child for key in family):
                    gate, up, last = (by_child[key] for key in family)
                    last.halves, last.beside = (gate, up), tuple(module.children())
                    gate.is_half = up.is_half = True
        for layer in self.layers:
            layer.counts = counts
            layer.module.__dict__["forward"] = StandIn(layer.module, "forward", layer)

    def _layer(self, name: str, module: nn.Module) -> AdaptedLayer | None:
        if not _is_adapted(module):
            return None
        base = module._modules.get("base_layer")
        own: dict[str, Any] = module.__dict__
        if type(module).__name__ not in _LAYERS or "_disable_adapters" not in own or base is None:
            why: Callable[..., Tensor] | str = f"PEFT's {type(module).__name__} is another kind of layer"
        elif not (_is_own(module, own.get("forward")) and _is_of(type(module).forward, "peft.")):
            why = _REPLACED
        elif all(_is_variant(own, adapter) for adapter in own["r"]):
            why = "its adapter is a variant of LoRA"
        else:
            why = _reader(base)
        if isinstance(why, str):
            self.left[why] += 1
            return None
        assert base is not None
        return AdaptedLayer(name.removeprefix("."), module, base, why, self._said)

    def tell(self) -> Iterator[str]:
        """What is computed how."""
        if self.layers:
            later = {id(each) for layer in self.layers for each in layer.after}
            steps = sum(id(layer) not in later for layer in self.layers)
            yield f"{len(self.layers)} layers with adapters are computed in {steps} steps (ds_hf.fused_lora)"
        for why, count in self.left.items():
            yield f"{count} layers with adapters are computed by PEFT: {why}"

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        return "adapters computed together" if any(layer.after for layer in self.layers) else ""

    def after_step(self, engine: Any) -> None:
        """Families that turned out to read different inputs are none."""
        for layer in self.layers:
            layer.forget()
            if layer.missed:
                layer.missed = False
                for other in self.layers:
                    if layer in other.after:
                        other.after.remove(layer)

    def close(self) -> None:
        for layer in self.layers:
            layer.forget()
            stand_in = layer.module.__dict__.get("forward")
            if isinstance(stand_in, StandIn) and stand_in.call is layer:
                del layer.module.__dict__["forward"]


def _families(name: str) -> Iterable[tuple[str, ...]]:
    """Of children of the module with this name."""
    part = name.rpartition(".")[2].lower()
    crosses = any(word in part for word in _CROSS)
    return [family[1:] if crosses and len(family) == 3 else family for family in _FAMILIES]


def _is_adapted(module: nn.Module) -> bool:
    return "lora_A" in module._modules and "lora_B" in module._modules


def attach(engine: Any) -> None:
    """Compute the adapters of ``engine``'s model together, unless a compiler or graphs are given PEFT's operations."""
    own = engine.settings.ds_hf
    if own.compile or own.capture:
        log_once(f"adapters are computed by PEFT: blocks are {'compiled' if own.compile else 'captured'} with them")
        return
    fused = FusedAdapters(engine.module)
    for line in fused.tell():
        log_once(line)
    if fused.layers:
        engine.events.add(fused)
        engine.events.step_hooks.append(fused.after_step)
