"""Layers that are described and not yet built: each stage builds its own ones alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.errors import ConfigError
from ds_hf.log import logger

__all__ = ["LayerSpec", "TiedLayerSpec", "check_apart", "layer_name", "on_meta", "tied_keys"]


class LayerSpec:
    """A layer: its class, and the arguments of its constructor.

    Raises:
        RuntimeError: the class is no ``torch.nn.Module``.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec takes a class of torch.nn.Module, not {typename!r:.80}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1

    def __repr__(self) -> str:
        shown = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(shown)})"

    def build(self, log: bool = False) -> nn.Module:
        """The module."""
        if log:
            logger.info("rank %d builds %r", self.global_rank, self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose module is one with all others of the same ``key``, on whichever stage they are.

    Args:
        key: of the module, which is ``PipelineModule.tied_modules[key]``.
        forward_fn: called as ``forward_fn(module, inputs)`` instead of the module.
        tied_weight_attr: paths of weights that the module has to have; all its parameters are tied.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def layer_name(layer: Any) -> str:
    """The class of a layer, or the function's name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def on_meta(layer: Any) -> nn.Module | None:
    """What a layer looks like, without values where it is only described; ``None`` for a function."""
    if isinstance(layer, nn.Module):
        return layer
    if not isinstance(layer, LayerSpec):
        return None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            with torch.device("meta"):
                return layer.build()
        except (NotImplementedError, RuntimeError):  # its constructor reads values
            return layer.build()


def tied_keys(layers: Iterable[Any]) -> dict[str, list[int]]:
    """The layers of each tied module, by key in ascending order.

    Raises:
        ConfigError: layers of one key have weights of other shapes, or lack a tied weight.
    """
    found: dict[str, list[int]] = {}
    shapes: dict[str, dict[str, torch.Size]] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, TiedLayerSpec):
            continue
        found.setdefault(layer.key, []).append(index)
        module = on_meta(layer)
        assert module is not None
        _check_attributes(index, layer, module)
        here = {name: param.shape for name, param in module.named_parameters()}
        first = shapes.setdefault(layer.key, here)
        if here != first:
            name = next(name for name in {**first, **here} if first.get(name) != here.get(name))
            raise ConfigError(
                f"layers {found[layer.key][0]} and {index} are tied by the key {layer.key!r}, and their {name} has "
                f"shape {list(first.get(name, ()))} in one and {list(here.get(name, ()))} in the other: give both "
                "specs the same class and sizes",
                "PipelineModule(layers=...)",
            )
    return dict(sorted(found.items()))


def check_apart(layers: Sequence[Any], stage_of: Callable[[int], int], tied: Collection[Tensor] = ()) -> None:
    """Refuse modules on several stages that share a parameter which trains: each stage would train its own copy.

    Args:
        tied: parameters that the stages hold together all the same.

    Raises:
        ConfigError: two modules share one; the first that is found is named.
    """
    homes: dict[Tensor, int] = {}
    allowed = set(tied)
    for index, layer in enumerate(layers):
        for name, param in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            first = homes.setdefault(param, index)
            if param.requires_grad and param not in allowed and stage_of(first) != stage_of(index):
                raise ConfigError(
                    f"layers {first} and {index} ({layer_name(layer)}) share the parameter {name}, and stages "
                    f"{stage_of(first)} and {stage_of(index)} would each train a copy of it: describe both as "
                    "TiedLayerSpec of one key, divide the layers so that one stage has both, or give each its own",
                    "PipelineModule(layers=...)",
                )


def _check_attributes(index: int, layer: TiedLayerSpec, module: nn.Module) -> None:
    for path in layer.tied_weight_attr:
        value: Any = module
        for name in path.split("."):
            value = getattr(value, name, None)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"layer {index} ({layer.typename.__name__}, key {layer.key!r}) has no weight {path!r}: "
                "tied_weight_attr names the weights that are tied",
                "PipelineModule(layers=...)",
            )
