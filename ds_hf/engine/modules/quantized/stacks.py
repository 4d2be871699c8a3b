"""Frozen experts that rest in blocks: parameters ``[experts, rows, columns]`` of one module.

bitsandbytes and torchao know layers, and leave such weights in 16 bits. Here each expert's matrix is written as a
layer's is (``format.py``), in one int8 parameter ``[experts, rows, bytes]``, so experts are divided over processes, cut
and put together as ever. A layer's weights are read for its products, forward and again backward
(``parallel.experts.compute``), and not kept in between. Modules that compute with their own forward are computed again
for backward, with values in the place of the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.modules.quantized.layers import Choose, keep_place
from ds_hf.engine.parallel.experts.compute import values_in_place
from ds_hf.engine.parallel.experts.divide import compute_together
from ds_hf.engine.parallel.experts.exchange import outside_graphs
from ds_hf.engine.parallel.experts.layer import ExpertLayer, why_by_own
from ds_hf.engine.parallel.experts.plan import find_experts
from ds_hf.engine.parallel.tensor.styles import change_own_class
from ds_hf.engine.zero.buffer import buffers_of, home_of, leave_home, logical_shape, unshard
from ds_hf.engine.zero.cut import cut_of, whole_shape
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = ["QuantizedStacks", "quantize_experts"]


@dataclass(frozen=True)
class Stack:
    """How one parameter is written.

    Attributes:
        shape: of one expert's matrix.
        dtype: in which it is read.
    """

    form: WeightFormat
    shape: tuple[int, int]
    dtype: torch.dtype

    def pack(self, values: Tensor) -> Tensor:
        """Of ``[experts, rows, columns]``; with groups along a column its matrices are transposed first."""
        rows = values.mT if self.form.dim == 0 else values
        packed = replace(self.form, dim=1).pack(rows.reshape(-1, rows.shape[-1]))
        return packed.view(len(values), rows.shape[1], -1)

    def values(self, packed: Tensor) -> Tensor:
        """What ``packed`` stands for, of however many experts."""
        rows, columns = self.shape if self.form.dim == 1 else self.shape[::-1]
        flat = packed.reshape(-1, packed.shape[-1])
        found = replace(self.form, dim=1).unpack(flat, (len(flat), columns), self.dtype).view(-1, rows, columns)
        return found if self.form.dim == 1 else found.mT


class QuantizedStacks(nn.Module):
    """The first base of the class of a module with such parameters, by whose names it reads their values."""

    _ds_stacks: dict[str, Stack]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = super().forward
        if not self._ds_stacks.keys().isdisjoint(self.__dict__):  # who calls it has put values there
            return own(*args, **kwargs)

        def with_values(*args: Any, **kwargs: Any) -> Any:
            with values_in_place(self, {name: getattr(self, name) for name in self._ds_stacks}):
                return own(*args, **kwargs)

        if not torch.is_grad_enabled():
            return with_values(*args, **kwargs)
        return outside_graphs(checkpoint)(with_values, *args, use_reentrant=False, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, stack in self._ds_stacks.items():
            packed = self._parameters[name]
            if packed is not None and packed.numel() and not keep_vars:
                warn_once(
                    "weights of 8 or 4 bits are saved as what they stand for, in the dtype that the model computes in"
                )
                with torch.no_grad():
                    destination[f"{prefix}{name}"] = stack.values(packed).clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, stack in self._ds_stacks.items():
            value, packed = state_dict.get(f"{prefix}{name}"), self._parameters[name]
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if floating and packed is not None and tuple(value.shape) == (len(packed), *stack.shape):
                state_dict = {**state_dict, f"{prefix}{name}": stack.pack(value)}
        super()._load_from_state_dict(state_dict, prefix, *args)


def quantize_experts(
    model: nn.Module,
    choose: Choose,
    section: ExpertParallelSection,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    trains: bool = True,
) -> list[str]:
    """Quantize the stacked experts of ``model`` for which ``choose`` gives a format; the names of the parameters.

    They are computed as with ``autoep_size`` 1, unless the file divides them. Collective where ZeRO has divided values.

    Args:
        choose: is given the name of a parameter, without PEFT's, and its module.
        dtype: in which they are read; ``None`` for each weight's own.
        device: where the blocks go, each weight before it is packed; ``None`` for where each is.
        trains: there is an optimizer, for which parameters that require gradients are not to be quantized.

    Raises:
        ConfigError: experts that train, adapters that only the module's own forward could compute with, or see
            ``quantize_stack``.
    """
    chosen = [
        (layer, key, form)
        for layer in find_experts(model, section)
        for key in layer.params
        if _is_stack(layer.module._parameters[key])
        and (form := choose(f"{layer.name.replace('.base_layer', '')}.{key}", layer.module)) is not None
    ]
    for layer, key, _ in chosen:
        _check(layer, key, trains=trains)
    for layer, key, form in chosen:
        if why_by_own(layer) is None and _whole_matrices(layer):
            compute_together(layer, section)
        quantize_stack(layer.module, key, form, dtype, device, trains=trains)
    return [f"{layer.name}.{key}" for layer, key, _ in chosen]


def _is_stack(param: Tensor | None) -> bool:
    return param is not None and len(whole_shape(param, logical_shape(param))) == 3 and not is_packed(param)


def _whole_matrices(layer: ExpertLayer) -> bool:
    """Whether tensor parallelism has left the experts' matrices whole."""
    return not any((cut := cut_of(param)) is not None and cut.dim for param in layer.module.parameters(recurse=False))


def _check(layer: ExpertLayer, key: str, *, trains: bool) -> None:
    param, name = layer.module._parameters[key], layer.name.replace(".base_layer", "")
    assert param is not None
    if trains and param.requires_grad:
        raise ConfigError(
            f"{name}.{key} is to rest in 8 or 4 bits, and it trains: weights in so few bits do not. Freeze it "
            "(requires_grad_(False)) and train adapters, of attention or of the experts (PEFT's target_parameters), or "
            "leave it out",
            "/weight_quantization",
        )
    if layer.around and (why := why_by_own(layer)) is not None:
        raise ConfigError(
            f"{name}.{key} is to rest in 8 or 4 bits, and it has adapters, with which ds_hf has to compute then: {why}",
            "/weight_quantization",
        )


@torch.no_grad()
def quantize_stack(
    module: nn.Module,
    key: str,
    form: WeightFormat,
    dtype: torch.dtype | None,
    device: torch.device | None = None,
    *,
    trains: bool = True,
) -> None:
    """Write ``module.key`` in blocks. Collective where it is divided by ZeRO.

    Args:
        dtype, device, trains: see ``quantize_experts``.

    Raises:
        ConfigError: it trains, and tensor parallelism has cut matrices.
    """
    param = module._parameters[key]
    assert param is not None
    cut = cut_of(param)
    if trains and cut is not None and cut.dim:
        raise ConfigError(
            f"each process has a part of every expert's {key} (tensor parallelism), and blocks of parts cannot be put "
            "together: divide experts by expert_parallel, or keep them in 16 bits",
            "/weight_quantization",
        )
    with unshard(buffers_of([param])):
        stack = Stack(form, (param.shape[1], param.shape[2]), dtype or param.dtype)
        packed = nn.Parameter(stack.pack(param.data.to(device or param.device)), requires_grad=False)
    if home_of(param) is not None:
        leave_home(param)
    keep_place(param, packed, by_rows=cut is None or not cut.dim)
    module._parameters[key] = packed
    stacks = {**module.__dict__.get("_ds_stacks", {}), key: stack}
    module.__dict__["_ds_stacks"] = stacks
    change_own_class(module, lambda own: _derived(own, tuple(stacks)))


_DERIVED: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
_OWN: dict[type[nn.Module], type[nn.Module]] = {}  # of a class that was derived here


def _derived(own: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    own = _OWN.get(own, own)
    if (own, names) not in _DERIVED:
        methods: dict[str, Any] = {name: property(_reader(name)) for name in names}
        methods["forward"] = _forward_as(own)
        made = type(f"Quantized{own.__name__}", (QuantizedStacks, own), {"__module__": __name__, **methods})
        _DERIVED[own, names], _OWN[made] = made, own
    return _DERIVED[own, names]


def _forward_as(own: type[nn.Module]) -> Callable[..., Any]:
    """``QuantizedStacks.forward`` with the arguments of the module's."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return QuantizedStacks.forward(module, *args, **kwargs)

    return functools.update_wrapper(forward, own.forward)


def _reader(name: str) -> Callable[[QuantizedStacks], Tensor]:
    def values(module: QuantizedStacks) -> Tensor:
        shown: Mapping[str, Any] = module.__dict__
        if name in shown:
            return shown[name]  # type: ignore[no-any-return]
        packed = module._parameters[name]
        assert packed is not None
        with torch.no_grad():
            return module._ds_stacks[name].values(packed)

    return values
