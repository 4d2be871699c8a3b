"""Layers whose ``weight`` is a packed parameter and reads as a 16-bit one.

A layer keeps its identity, hooks and bias; its class becomes one that is derived from its own, and in it ``weight`` is
a property. So whatever uses ``layer.weight`` computes with the values. Linear layers and embeddings have ways of their
own: backward of the one reads the blocks again instead of keeping 16 bits, the other reads the rows that it looks up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.parallel.tensor.gathered import Divided
from ds_hf.engine.parallel.tensor.styles import is_transposed
from ds_hf.engine.zero.buffer import buffers_of, home_of, leave_home, logical_shape, unshard
from ds_hf.engine.zero.cut import Cut, cut_of, part_of_stack, set_cut
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.replicas import divide_over_experts, expert_processes
from ds_hf.errors import DsHfError
from ds_hf.log import log_once, warn_once

__all__ = [
    "QuantizedWeight",
    "computes_blocks",
    "formats_of_blocks",
    "has_stacks",
    "is_quantized",
    "keep_place",
    "quantize_layers",
    "tied_weights",
    "values_of_blocks",
]


class QuantizedWeight(nn.Module):
    """What the classes below have in common: the first base of the class of a quantized layer."""

    _ds_format: WeightFormat
    _ds_shape: tuple[int, int]
    _ds_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The values ``[rows, columns]``, computed each time: the blocks would not follow what is written to them."""
        packed = self._parameters["weight"]
        assert packed is not None
        with torch.no_grad():
            return self._ds_format.unpack(packed, self._ds_shape, self._ds_dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed = self._parameters["weight"]
        if packed is not None and packed.numel():
            warn_once(
                "weights of 8 or 4 bits are saved as what they stand for, in the dtype that the model computes in"
            )
            with torch.no_grad():
                destination[f"{prefix}weight"] = self._ds_format.unpack(packed, self._ds_shape, self._ds_dtype).clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        value = state_dict.get(f"{prefix}weight")
        if isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == self._ds_shape:
            state_dict = {**state_dict, f"{prefix}weight": self._ds_format.pack(value)}
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Product(torch.autograd.Function):
    """``x @ weight.T``, or ``x @ weight``, that keeps the blocks for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, layer: QuantizedWeight, transposed: bool) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.layer, ctx.transposed = layer, transposed
        weight = layer._ds_format.unpack(packed, layer._ds_shape, layer._ds_dtype)
        return torch.matmul(x, weight) if transposed else F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        weight = ctx.layer._ds_format.unpack(packed, ctx.layer._ds_shape, ctx.layer._ds_dtype)
        return torch.matmul(grad, weight.t() if ctx.transposed else weight), None, None, None


class _Linear(QuantizedWeight):
    _ds_transposed = False

    def forward(self, x: Tensor) -> Tensor:
        packed, bias = self._parameters["weight"], self._parameters["bias"]
        dtype = self._ds_dtype
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        total: Tensor = _Product.apply(x.to(dtype), packed, self, self._ds_transposed)  # type: ignore[no-untyped-call]
        return total if bias is None else total + bias.to(total.dtype)


class _Transposed(_Linear):
    _ds_transposed = True


class _Embedding(QuantizedWeight):
    def forward(self, ids: Tensor) -> Tensor:
        packed = self._parameters["weight"]
        assert packed is not None
        rows = packed[ids.reshape(-1)]
        values = self._ds_format.unpack(rows, (len(rows), self._ds_shape[1]), self._ds_dtype)
        return values.view(*ids.shape, -1)


def is_quantized(module: nn.Module) -> bool:
    """Whether its weight lies in blocks, or those of its experts do."""
    return isinstance(module, QuantizedWeight) or bool(_stacks_of(module))


def computes_blocks(module: nn.Module) -> bool:
    """Whether it is a linear layer of which its blocks, ``_ds_format`` and ``_ds_transposed`` say all."""
    return isinstance(module, _Linear) and type(module).forward is _Linear.forward


def has_stacks(model: nn.Module) -> bool:
    """Whether parameters have the three dimensions of stacked experts, and are no blocks yet."""
    return any(len(logical_shape(param)) == 3 and not is_packed(param) for param in model.parameters())


def _stacks_of(module: nn.Module) -> dict[str, Any]:
    """``stacks.Stack`` of the parameters that have one; only models with experts load that file."""
    found: dict[str, Any] = module.__dict__.get("_ds_stacks", {})
    return found


def values_of_blocks(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from a parameter of ``model`` and its whole value to what that stands for."""
    read: dict[int, Callable[[Tensor], Tensor]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedWeight):
            values = partial(module._ds_format.unpack, shape=module._ds_shape, dtype=module._ds_dtype)
            read[id(module._parameters["weight"])] = partial(_whole_values, module._parameters["weight"], 2, values)
        for name, stack in _stacks_of(module).items():
            read[id(module._parameters[name])] = partial(_whole_values, module._parameters[name], 3, stack.values)

    def readable(param: Tensor, value: Tensor) -> Tensor:
        return read[id(param)](value) if id(param) in read else value

    return readable


def _whole_values(param: Any, dims: int, values: Callable[[Tensor], Tensor], packed: Tensor) -> Tensor:
    """What blocks stand for: ``dims`` dimensions of them, or the parts of all processes (``keep_place``)."""
    if packed.dim() == dims:
        return values(packed)
    cuts: Any = param._ds_values_cuts
    parts = [values(part.contiguous()) for part in packed]
    whole = parts[0].new_empty(cuts[0].whole)
    for cut, part in zip(cuts, parts, strict=True):
        cut.put(whole, part)
    return whole


def formats_of_blocks(model: nn.Module) -> list[tuple[nn.Parameter, list[Any]]]:
    """The parameters of ``model`` that are blocks, and the fields of their formats."""
    found = []
    for module in model.modules():
        forms = {name: stack.form for name, stack in _stacks_of(module).items()}
        if isinstance(module, QuantizedWeight):
            forms["weight"] = module._ds_format
        found += [
            (param, list(astuple(form)))
            for name, form in forms.items()
            if (param := module._parameters[name]) is not None
        ]
    return found


Choose = Callable[[str, nn.Module], WeightFormat | None]


@torch.no_grad()
def quantize_layers(
    model: nn.Module,
    choose: Choose,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    frozen_only: bool = False,
) -> list[str]:
    """Quantize the linear layers and embeddings of ``model`` for which ``choose`` gives a format; their names.

    Tied weights stay, and so do adapters, also those that do not train now, weights that are quantized already, layers
    of classes that compute with more than their own ``forward``, and whatever is not a layer with a 2-D weight.
    Values that are divided over processes are gathered layer by layer: all processes call it.

    Args:
        dtype: in which the weights are read; ``None`` for each weight's own.
        device: where the blocks go, each weight before it is packed; ``None`` for where each is.
        frozen_only: what trains stays.
    """
    done, tied, adapters = [], tied_weights(model), _adapters(model)
    for name, module in list(_layers(model)):
        if id(module) in adapters:
            continue
        param = module._parameters["weight"]
        form = None if param is None or is_packed(param) or id(param) in tied else choose(name, module)
        if form is None or param is None or (frozen_only and param.requires_grad):
            continue
        buffers = buffers_of([param])
        with unshard(buffers):
            if param.dim() != 2:
                continue
            value, own = param.data.to(device or param.device), dtype or param.dtype
            if isinstance(module, nn.Embedding) and form.dim == 0:
                form = WeightFormat(form.bits, form.group, form.symmetric)
            packed = form.pack(value)
            shape = (value.shape[0], value.shape[1])
            del value
        if home_of(param) is not None:
            leave_home(param)
        _become(module, form, shape, own, packed)
        cut = cut_of(param)
        keep_place(param, module._parameters["weight"], cut is not None and cut.dim == 1 - form.dim)
        done.append(name)
    _refuse_merging(model)
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3 and not is_packed(p))
    if done and stacked:
        log_once(f"weights stacked in three dimensions (experts) stay as they are: {stacked} elements")
    return done


def keep_place(param: nn.Parameter, packed: Any, by_rows: bool) -> None:
    """Let the blocks of ``param`` be divided over the processes over which it was.

    Args:
        by_rows: it was cut along the rows of ``packed``; else each process has a part of every row, with blocks of its
            own, and the parts are slices of a stack.
    """
    if (size := expert_processes(param)) > 1:
        divide_over_experts(packed, size)
    cut, divided = cut_of(param), getattr(param, "_ds_divided", None)
    if cut is None or divided is None:
        return
    axis, local = divided.axis, packed.shape
    if by_rows:
        whole = torch.Size([cut.whole[cut.dim], *local[1:]])
        cuts = [Cut(0, each.ranges, whole) for each in divided.cuts]
    else:
        cuts = [part_of_stack(local, rank, axis.world_size) for rank in range(axis.world_size)]
        packed._ds_values_cuts = divided.cuts
    set_cut(packed, cuts[axis.rank])
    packed._ds_divided = Divided(axis, cuts)


def _refuse_merging(model: nn.Module) -> None:
    """PEFT adds a merged adapter to ``base_layer.weight.data``, where it would be lost."""
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        while isinstance(getattr(base, "base_layer", None), nn.Module):
            base = base.base_layer  # type: ignore[union-attr]
        if isinstance(base, nn.Module) and is_quantized(base) and hasattr(module, "merge"):
            module.__dict__["merge"] = _Unmergeable(name)


class _Unmergeable:
    """In place of the ``merge`` of an adapter whose base is quantized."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise DsHfError(
            f"the adapter of {self.name} cannot be merged: its base is kept in 8 or 4 bits, which cannot hold it. "
            "Use it unmerged, or load the base without quantization to merge"
        )


def tied_weights(model: nn.Module) -> set[int]:
    """``id`` of the parameters that several modules hold."""
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {param for param, holders in held.items() if holders > 1}


def _adapters(model: nn.Module) -> set[int]:
    """``id`` of the modules of PEFT's adapters, which lie beside the layer that they are for."""
    found = set[int]()
    for module in model.modules():
        base = getattr(module, "base_layer", getattr(module, "original_module", None))
        for child in module.children() if isinstance(base, nn.Module) else ():
            found.update(id(each) for each in child.modules() if child is not base)
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or is_transposed(module)
        if module._parameters.get("weight") is not None and (linear or isinstance(module, nn.Embedding)):
            yield name, module


def _become(module: nn.Module, form: WeightFormat, shape: tuple[int, int], dtype: torch.dtype, packed: Tensor) -> None:
    own: Any = type(module)
    base: type[QuantizedWeight] = QuantizedWeight
    if own.forward is nn.Linear.forward:
        base = _Linear
    elif own.__name__ == "Conv1D":
        base = _Transposed
    elif own.forward is nn.Embedding.forward and getattr(module, "max_norm", None) is None:
        base = _Embedding
    module.__dict__.update(_ds_format=form, _ds_shape=shape, _ds_dtype=dtype)
    module._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
    module.__class__ = _derived(base, own)


_DERIVED: dict[tuple[type[QuantizedWeight], type[nn.Module]], type[nn.Module]] = {}


def _derived(base: type[QuantizedWeight], own: type[nn.Module]) -> type[nn.Module]:
    """One class for each pair, by which compiled code is shared."""
    if (base, own) not in _DERIVED:
        _DERIVED[base, own] = type(f"Quantized{own.__name__}", (base, own), {"__module__": __name__})
    return _DERIVED[base, own]
