"""Which stage has which layers, and what each layer takes: ``divide_layers``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.ops.triton_launches import launching_nothing
from ds_hf.engine.parallel.pipeline.partition import (
    bounds_of,
    partition_balanced,
    partition_by_cost,
    partition_uniform,
    stage_of,
)
from ds_hf.engine.parallel.pipeline.specs import TiedLayerSpec, layer_name, on_meta
from ds_hf.errors import ConfigError

__all__ = ["LayerCost", "LayerDivision", "divide_layers", "layer_costs"]

_WHERE = "PipelineModule(partition_method=...)"
_TRAINED_NBYTES, _FROZEN_NBYTES = 18, 2  # of an element: 16-bit value and gradient, fp32 gradient, master and moments


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes.

    Attributes:
        name: its class.
        trained, frozen: elements of its parameters; of a tied module with its first layer alone.
        activations: bytes that its forward keeps for backward, of one micro-batch; 0 where nothing is known.
    """

    name: str
    trained: int
    frozen: int
    activations: int = 0

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer states, undivided."""
        return self.trained * _TRAINED_NBYTES + self.frozen * _FROZEN_NBYTES


@dataclass(frozen=True)
class LayerDivision:
    """The layers of each stage.

    Attributes:
        parts: bounds of ``stages * chunks`` consecutive parts; part ``p`` is on stage ``p % stages`` or, ``folded``, on
            that stage counted from the last one in every other chunk.
        stages: of the pipeline.
        costs: of each layer.
        method: by which it was made.
    """

    parts: list[int]
    stages: int
    costs: tuple[LayerCost, ...]
    method: str
    folded: bool = False

    def bounds(self, stage: int) -> list[tuple[int, int]]:
        """The layers ``(start, stop)`` of each chunk of a stage."""
        return bounds_of(self.parts, self.stages, stage, folded=self.folded)

    def stage_of(self, layer: int) -> int:
        """The stage that has a layer."""
        part = next(part for part in range(len(self.parts) - 1) if layer < self.parts[part + 1])
        return stage_of(part, self.stages, folded=self.folded)

    def table(self, layers: Sequence[Any]) -> str:
        """The stages with their layers and parameters, for people."""
        total = max(sum(cost.trained + cost.frozen for cost in self.costs), 1)
        rows = [("stage", "layers", "parameters", "", "classes")]
        for stage in range(self.stages):
            bounds = self.bounds(stage)
            here = [index for start, stop in bounds for index in range(start, stop)]
            numel = sum(self.costs[index].trained + self.costs[index].frozen for index in here)
            spans = ", ".join(f"{start}-{stop - 1}" if stop - start > 1 else str(start) for start, stop in bounds)
            rows.append((str(stage), spans, f"{numel:,}", f"{numel / total:.0%}", _runs([layers[i] for i in here])))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return "\n".join([f"{len(self.costs)} layers on {self.stages} stages by {self.method}", *lines])


def _runs(layers: Sequence[Any]) -> str:
    found: list[tuple[str, int]] = []
    for layer in layers:
        name = layer_name(layer)
        again = bool(found) and found[-1][0] == name
        found[-1 if again else len(found) :] = [(name, found[-1][1] + 1 if again else 1)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in found)


def divide_layers(
    layers: Sequence[Any], stages: int, method: str, *, chunks: int = 1, folded: bool = False, sample: Any = None
) -> LayerDivision:
    """Cut ``layers`` into ``stages * chunks`` parts.

    Args:
        method, folded: see ``StageModule``.
        sample: inputs of the first layer, for ``"memory"``.

    Raises:
        ConfigError: there are fewer layers than parts, the method is unknown, or its pattern fits no layer.
    """
    parts, name = stages * chunks, method.lower()
    if len(layers) < parts:
        held = f"{stages} stages" if chunks == 1 else f"{stages} stages x {chunks} chunks"
        count = f"{len(layers)} layer{'' if len(layers) == 1 else 's'}"
        raise ConfigError(
            f"{count} cannot be divided over {held}: use fewer, or make two layers of a large one", _WHERE
        )
    costs = layer_costs(layers, sample if name == "memory" else None)
    if name == "uniform":
        bounds = partition_uniform(len(layers), parts)
    elif name == "parameters":
        bounds = partition_balanced([cost.trained for cost in costs], parts)
    elif name.startswith("type:"):
        bounds = partition_balanced(_matches(layers, method.partition(":")[2]), parts)
    elif name == "memory":
        bounds = partition_by_cost(len(layers), parts, _memory(costs, stages, parts))
    else:
        known = '"parameters", "uniform", "type:REGEX" and "memory"'
        raise ConfigError(f"there is no partition method {method!r:.60}: there are {known}", _WHERE)
    return LayerDivision(bounds, stages, tuple(costs), method, folded)


def _matches(layers: Sequence[Any], pattern: str) -> list[int]:
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"{pattern!r:.60} is not a regular expression: {error}", _WHERE) from error
    found = [int(wanted.search(layer_name(layer)) is not None) for layer in layers]
    if not any(found):
        names = ", ".join(sorted({layer_name(layer) for layer in layers})[:8])
        raise ConfigError(f"no layer's class matches {pattern!r:.60}: there are {names}", _WHERE)
    return found


def _memory(costs: Sequence[LayerCost], stages: int, parts: int) -> Any:
    """Bytes of a part: states, and activations of as many micro-batches as 1F1B keeps in flight there."""

    def cost(part: int, start: int, stop: int) -> float:
        in_flight = stages - part % stages if parts == stages else parts - part
        return sum(each.states + each.activations * in_flight for each in costs[start:stop])

    return cost


# -- what a layer takes -------------------------------------------------------------------------------------------


def layer_costs(layers: Sequence[Any], sample: Any = None) -> list[LayerCost]:
    """What each layer takes; one is described at a time, on the meta device.

    Args:
        sample: inputs of the first layer; then activations are measured by running all layers on the meta device.
    """
    costs, tied, value = [], set(), _meta(sample) if sample is not None else None
    for index, layer in enumerate(layers):
        module = on_meta(layer)
        counted = not (isinstance(layer, TiedLayerSpec) and layer.key in tied)
        if isinstance(layer, TiedLayerSpec):
            tied.add(layer.key)
        params = list(module.parameters()) if module is not None and counted else []
        trained = sum(param.numel() for param in params if param.requires_grad)
        kept = 0
        if value is not None:
            value, kept = _run_on_meta(index, layer, module, value)
        costs.append(LayerCost(layer_name(layer), trained, sum(p.numel() for p in params) - trained, kept))
    return costs


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        like = torch.empty_like(value, device="meta")
        return like.requires_grad_() if like.is_floating_point() else like
    if isinstance(value, tuple | list):
        return tuple(_meta(item) for item in value)
    raise ConfigError(
        f"sample is a tensor or a tuple of tensors, not {type(value).__name__}", "PipelineModule(sample=...)"
    )


def _run_on_meta(index: int, layer: Any, module: nn.Module | None, value: Any) -> tuple[Any, int]:
    """The layer's outputs and the bytes that autograd keeps of its forward, without its parameters."""
    own = {id(param) for param in module.parameters()} if module is not None else set()
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in own and not isinstance(tensor, nn.Parameter):
            seen[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    kept: list[Tensor] = []
    run = layer if module is None else module
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        function = layer.forward_fn
        assert module is not None
        held = module
        run = lambda inputs: function(held, inputs)  # noqa: E731
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.device("meta"), hooks, launching_nothing():
            output = run(value)
    except Exception as error:
        raise ConfigError(
            f"layer {index} ({layer_name(layer)}) does not run on the meta device with the sample: "
            f"{type(error).__name__}: {error}",
            "PipelineModule(sample=...)",
        ) from error
    return _meta(output), sum(seen.values())
