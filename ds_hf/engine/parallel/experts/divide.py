"""Dividing the experts of a model: each process keeps a part of every layer's, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.parallel.experts.adapters import check_cut, cut_adapters, take_adapters
from ds_hf.engine.parallel.experts.dispatch import DispatchedExperts, LocalExperts
from ds_hf.engine.parallel.experts.layer import ExpertLayer
from ds_hf.engine.parallel.experts.plan import any_number, plan_experts
from ds_hf.engine.parallel.tensor.divide import cut_parameter
from ds_hf.engine.parallel.tensor.functions import Place
from ds_hf.engine.parallel.tensor.plan import Slicing
from ds_hf.engine.parallel.tensor.styles import CutModule, Style, own_class, place_of, swap_class
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.replicas import divide_over_experts
from ds_hf.errors import ConfigError
from ds_hf.log import log_once

__all__ = ["check_places", "compute_together", "divide_experts", "divide_experts_without_values", "told"]


def divide_experts(model: nn.Module, mesh: Mesh, section: ExpertParallelSection, optimizer: Any = None) -> None:
    """Cut the experts of ``model`` over the expert axis of ``mesh``, in place. Collective.

    A model whose experts are divided over as many processes already (by an engine that was destroyed) stays as it is.

    Args:
        optimizer: one that was made of the model's parameters; its states are cut with them.

    Raises:
        ConfigError: see ``plan_experts``; or its experts are divided otherwise already.
    """
    size = mesh.shape.expert
    layers = plan_experts(model, section, size)
    if size == 1:
        for layer in layers:
            _keep(layer, Axis(None, 0, 1), section)
    else:
        parts, same = mesh.experts
        for layer in layers:
            if (place := _divided(layer)) is not None:
                _check_alike(layer.name, place.axis, parts)
                check_cut(layer.around, layer.name)
            else:
                _divide(layer, parts, same, section, optimizer)
    for line in told(layers, size):
        log_once(line)


def told(layers: Sequence[ExpertLayer], size: int) -> list[str]:
    """What was found and is done with it, a line for layers that are alike but for their number."""
    if not layers:
        return ["experts: other adapters or quantization leave each layer to its own forward"]
    alike: dict[tuple[Any, ...], list[ExpertLayer]] = {}
    for layer in layers:
        places = (any_number(layer.name), tuple(any_number(name) for name in layer.beside))
        alike.setdefault((*places, layer.count, layer.params, layer.said), []).append(layer)
    lines = []
    for (name, beside, count, params, said), group in alike.items():
        found = f"{name} ({', '.join(params)}), {group[0].name} the first, found by {said}"
        if size == 1:
            lines.append(f"experts of {len(group)} layers are computed together on each process, {count} each: {found}")
            continue
        divided = f"divided over {size} processes, {count // size} of {count} on each"
        whole = ", ".join([*beside, "all outside of these blocks"])
        lines.append(f"experts of {len(group)} layers are {divided}: {found}; whole on each process: {whole}")
    return lines


def divide_experts_without_values(model: nn.Module, section: ExpertParallelSection) -> None:
    """Divide a model on the meta device as each process has it, for predictions: nothing is sent, and tokens choose
    all experts equally often.

    Raises:
        ConfigError: see ``plan_experts``.
    """
    axis = Axis(None, 0, section.autoep_size)
    for layer in plan_experts(model, section, axis.world_size):
        if axis.world_size == 1:
            _keep(layer, axis, section)
        else:
            _divide(layer, axis, None, section, None)


def _divide(layer: ExpertLayer, parts: Axis, same: Axis | None, section: ExpertParallelSection, optimizer: Any) -> None:
    """Leave of one layer the experts that are here. Collective where it has values."""
    for key in layer.params:
        param = layer.module._parameters[key]
        assert param is not None
        if cut_of(param) is None:  # two modules may have one parameter (PEFT's layer_replication)
            slicing = Slicing(layer.name, layer.module, Style(), {key: (0, (layer.count,))})
            cut_parameter(param, slicing, key, parts, optimizer, shards=same)
            divide_over_experts(param, parts.world_size)
    place = Place(parts, layer.name.removesuffix(".base_layer"), [None])
    cut_adapters(layer.around, layer.count, place, same, optimizer)
    counts = _local_counts(layer, parts.world_size)
    _give_class(layer, DispatchedExperts, parts, section, **counts)


def compute_together(layer: ExpertLayer, section: ExpertParallelSection) -> None:
    """As with ``autoep_size`` 1, of a layer in a model whose file does not say so; divided ones stay."""
    if not isinstance(layer.module, LocalExperts | DispatchedExperts):
        _keep(layer, Axis(None, 0, 1), section)


def _keep(layer: ExpertLayer, axis: Axis, section: ExpertParallelSection) -> None:
    """All experts of the layer stay on each process, which computes them without dispatch."""
    if (place := _divided(layer)) is not None:
        if not isinstance(layer.module, LocalExperts | DispatchedExperts):
            raise ConfigError(
                f"the model's tp_plan divides the experts of {layer.name} over {place.axis.world_size} processes "
                "(tensor_parallel), and expert_parallel would compute whole ones: remove expert_parallel",
                "/expert_parallel/autoep_size",
            )
        _check_alike(layer.name, place.axis, axis)
    _give_class(layer, LocalExperts, axis, section)


def _give_class(
    layer: ExpertLayer, base: type[CutModule], axis: Axis, section: ExpertParallelSection, **counts: int
) -> None:
    known = {"_ds_experts": layer.count, "_ds_grouped": section.use_grouped_mm, **counts}
    place = Place(axis, layer.name, [None])
    swap_class(layer.module, base, place, **known)
    take_adapters(layer.around, place)


def _divided(layer: ExpertLayer) -> Place | None:
    """Where an engine before has divided the layer; one that kept all experts here leaves no trace."""
    if isinstance(layer.module, LocalExperts):
        layer.module.__class__ = own_class(layer.module)  # type: ignore[assignment]
        del layer.module.__dict__["_ds_place"]
    return place_of(layer.module)


def check_places(model: nn.Module, mesh: Mesh) -> None:
    """For an engine that divides none: experts that an engine before divided are where this one looks for them.

    Raises:
        ConfigError: other processes hold them.
    """
    for name, module in model.named_modules():
        if isinstance(module, DispatchedExperts) and (place := place_of(module)) is not None:
            size = place.axis.world_size
            fits = (mesh.shape.data * mesh.shape.sequence) % size == 0
            _check_alike(name, place.axis, mesh.experts_over(size)[0] if fits else Axis(None, 0, 1))


def _check_alike(name: str, before: Axis, now: Axis) -> None:
    ranks = [[axis.global_rank(rank) for rank in range(axis.world_size)] for axis in (before, now)]
    if ranks[0] != ranks[1] or now.world_size == 1:
        raise ConfigError(
            f"the experts of {name} were divided over {before.world_size} processes by an engine before, and now "
            f"it is to be {now.world_size}, or others: load the model anew",
            "initialize(model=...)",
        )


def _local_counts(layer: ExpertLayer, size: int) -> dict[str, int]:
    """What the module's own code counts its experts by."""
    own = vars(layer.module)
    return {name: value // size for name, value in own.items() if value == layer.count and _counts(name, value)}


def _counts(name: str, value: Any) -> bool:
    return type(value) is int and "expert" in name and not name.startswith("_")
