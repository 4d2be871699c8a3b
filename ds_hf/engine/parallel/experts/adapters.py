"""PEFT's LoRA on the experts' own parameters (``target_parameters``), without a sum of weight and adapter.

PEFT computes ``W + scaling * B @ A`` for all experts of a layer in each forward, and autograd keeps it. Here routes are
sorted by expert, so the adapter is two small grouped products beside the one of the weight (``compute.py``). Its layers
stay PEFT's: one (``ParamWrapper``) around the module for each of its parameters, with ``A`` as ``[experts * rank,
inputs]``, experts first, and ``B`` as ``[outputs, rank * experts]``, ranks first. Divided experts take their parts of
both; files hold the whole. Layers are known by what they can do, so peft need not be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.experts.exchange import outside_graphs
from ds_hf.engine.parallel.tensor.divide import cut_parameter
from ds_hf.engine.parallel.tensor.functions import Place
from ds_hf.engine.parallel.tensor.plan import Slicing
from ds_hf.engine.parallel.tensor.styles import CutModule, Style, swap_class
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.replicas import divide_over_experts
from ds_hf.errors import ConfigError

__all__ = ["adapted", "adapters_of", "check_cut", "cut_adapters", "is_adapter", "take_adapters", "whole_delta"]

_KNOWN = ("parameter_name", "lora_A", "lora_B", "scaling", "num_experts", "_activate_lora")
_ATTRIBUTE = "_ds_adapters"


class Factors(NamedTuple):
    """An adapter of one parameter: what it adds to the weight is ``scaling * left @ right``.

    Attributes:
        left: ``[experts, d1, rank]``; right: ``[experts, rank, d2]``, where the weight is ``[experts, d1, d2]``.
    """

    left: Tensor
    right: Tensor
    scaling: float


def is_adapter(module: Any) -> bool:
    """Whether ``module`` is PEFT's layer around one with a parameter that has adapters."""
    return all(hasattr(module, name) for name in _KNOWN)


def adapters_of(module: nn.Module, name: str) -> Sequence[Factors]:
    """The adapters that are active, in this call, of a parameter of ``module``."""
    active = module.__dict__.get(_ATTRIBUTE, {}).get(name)
    return () if active is None else [active[0].factors(adapter) for adapter in active[1]]


def adapted(module: nn.Module) -> bool:
    """Whether adapters are active in this call."""
    return bool(module.__dict__.get(_ATTRIBUTE))


def whole_delta(weight: Tensor, factors: Sequence[Factors]) -> Tensor:
    """The weight with its adapters, as PEFT computes it."""
    with nullcontext() if weight.is_meta else torch.autocast(weight.device.type, enabled=False):
        for left, right, scaling in factors:
            weight = torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=scaling)
    return weight


class AdaptedExperts(CutModule):
    """PEFT's layer, which lets the experts compute with its adapters and does not change their parameters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return outside_graphs(super().forward)(x, *args, **kwargs)

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        """PEFT's, which puts the sum in the place of the parameter while the experts compute."""
        layer: Any = self
        active = layer.get_base_layer().__dict__.setdefault(_ATTRIBUTE, {})
        here = [adapter for adapter in active_adapters if adapter in layer.lora_A]
        if here:
            active[layer.parameter_name] = (self, here)
        try:
            yield
        finally:
            active.pop(layer.parameter_name, None)

    def factors(self, adapter: str) -> Factors:
        """Of this process's experts, in the adapter's dtype."""
        layer: Any = self
        first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        first = first.view(layer.num_experts, -1, first.shape[1])  # [experts, rank, inputs]
        second = second.view(second.shape[0], -1, layer.num_experts).permute(2, 0, 1)  # [experts, outputs, rank]
        if getattr(layer, "_did_swap_in_out_features", False):
            return Factors(second, first, layer.scaling[adapter])
        return Factors(first.mT, second.mT, layer.scaling[adapter])

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        """PEFT's, which takes a single expert for an ordinary layer."""
        layer: Any = self
        if layer.num_experts > 1:
            return super().get_delta_weight(adapter, *args, **kwargs)  # type: ignore[misc, no-any-return]
        left, right, scaling = self.factors(adapter)
        return ((left @ right) * scaling).to(layer.get_param().dtype)


# -- before training -----------------------------------------------------------------------------------------------


def take_adapters(adapters: Sequence[nn.Module], place: Place) -> None:
    """Let the experts that lie in ``adapters`` compute with them."""
    for adapter in adapters:
        if not isinstance(adapter, AdaptedExperts):
            name = type(adapter).__name__
            swap_class(adapter, AdaptedExperts, place)
            type(adapter).__name__ = name  # by which PEFT knows its layers when it adds an adapter


def cut_adapters(adapters: Sequence[Any], count: int, place: Place, same: Axis | None, optimizer: Any) -> None:
    """Leave of the adapters of ``count`` experts the part of this process. Collective where they have values.

    Args:
        same: see ``cut_parameter``.
    """
    parts = place.axis
    for layer in adapters:
        for adapter, rank in layer.r.items():
            first, second = layer.lora_A[adapter], layer.lora_B[adapter]
            for module, key, sizes in ((first, 0, (count * rank,)), (second, 1, (count,) * rank)):
                slicing = Slicing(f"{place.name} ({adapter})", module, Style(), {"weight": (key, sizes)})
                cut_parameter(module.weight, slicing, "weight", parts, optimizer, shards=same)
                divide_over_experts(module.weight, parts.world_size)
            first.out_features = second.in_features = count // parts.world_size * rank
        layer.num_experts = count // parts.world_size


def check_cut(adapters: Sequence[Any], name: str) -> None:
    """Of experts that an engine before has divided: so are their adapters.

    Raises:
        ConfigError: one was added later, for the part of the experts that was there.
    """
    for layer in adapters:
        for adapter in layer.r:
            if cut_of(layer.lora_A[adapter].weight) is None:
                raise ConfigError(
                    f"the adapter {adapter} was added to {name} after an engine had divided its experts, so it is of a "
                    "part of them: load the model anew, and add it before initialize()",
                    "initialize(model=...)",
                )
