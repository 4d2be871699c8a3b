"""PEFT's adapters as parts of the weights they belong to, one tensor at a time, for programs that load the model alone.

Layers are known by what they can do, so peft need not be there. The sum is PEFT's own ``merge()`` on a copy of the
weight, which takes the weight's place in the layer meanwhile: the model's memory is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.errors import CheckpointError

__all__ = ["Merging", "in_buckets"]


class Merging:
    """Names and values of ``model`` as they are without its adapters, those that are active now merged.

    Raises:
        CheckpointError: an adapter is not part of a weight (prompts, prefixes), or a layer cannot merge.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, Any] = {}  # adapters' layers by their paths, a layer that lies in another after it
        self._moves: list[tuple[str, str, str]] = []  # what begins with the third and not with the first is PEFT's
        for path, module in model.named_modules():
            layer: Any = module
            prefix = f"{path}." if path else ""
            if hasattr(layer, "peft_config") and hasattr(layer, "base_model") and hasattr(layer, "peft_type"):
                if getattr(layer, "prompt_encoder", None):
                    raise CheckpointError(
                        f"merged weights: {layer.peft_type} adds tokens or keys to what the model reads, which no "
                        "weight can hold: ask for the weights without merged=True"
                    )
                self._move(f"{prefix}base_model.model.", prefix, f"{prefix}base_model.")
            elif _is_tuner(layer):
                self.layers[prefix] = layer
                self._move(f"{prefix}base_layer.", prefix, prefix)
            elif hasattr(layer, "original_module"):
                if not hasattr(layer, "modules_to_save"):
                    raise CheckpointError(
                        f"merged weights: {path} is a {type(layer).__name__}, whose part of the weight is not known "
                        "here: ask for the weights without merged=True"
                    )
                active = [name for name in layer.active_adapters if name in layer.modules_to_save]
                source = f"modules_to_save.{active[0]}." if active else "original_module."
                self._move(f"{prefix}{source}", prefix, prefix)
        self._adapters = {
            id(param) for layer in self.layers.values() for param in layer.parameters() if not _in_base(layer, param)
        }

    def _move(self, source: str, target: str, own: str) -> None:
        self._moves.append((source, target, own))

    def name_of(self, name: str) -> str | None:
        """The name without adapters, of a parameter or buffer that has ``name`` with them; ``None``: it goes."""
        for source, target, own in reversed(self._moves):  # the innermost first
            if name.startswith(source):
                name = target + name[len(source) :]
            elif name.startswith(own):
                return None
        return name

    def changes(self, name: str) -> bool:
        """Whether the parameter ``name`` has active adapters."""
        return any(True for _ in self._of(name))

    def has_adapters(self, params: Iterable[Tensor]) -> bool:
        """Whether some of ``params`` are adapters'."""
        return any(id(param) in self._adapters for param in params)

    def merged(self, name: str, value: Tensor) -> Tensor:
        """``value`` of the parameter ``name``, as this process has it, with its active adapters: a copy.

        The adapters of the layer have to be here, as far as the layer itself is.
        """
        for layer, attribute in self._of(name):
            value = _with_adapters(layer, attribute, value, name)
        return value

    def _of(self, name: str) -> Iterator[tuple[Any, str]]:
        """The layers whose adapters are added to the parameter ``name``, and how their base calls it."""
        path = name.split(".")
        for prefix, layer in self.layers.items():
            own, rest = path[: prefix.count(".")] == prefix.split(".")[:-1], path[prefix.count(".") :]
            inside = list(dropwhile("base_layer".__eq__, rest))  # others' layers may lie around the same base
            if own and 0 < len(inside) < len(rest) and _merges(layer, inside[0]):
                yield layer, ".".join(inside)  # a path where torchao's weight is several tensors


def _with_adapters(layer: Any, attribute: str, value: Tensor, name: str) -> Tensor:
    """PEFT's ``merge`` of ``layer`` with ``value`` in the place of a parameter of its base."""
    base = layer.get_base_layer()
    before = dict(base._parameters)
    readable = attribute in before and value.is_floating_point() and value.element_size() > 1
    if not readable or value.shape != logical_shape(before[attribute]):
        raise CheckpointError(
            f"merged weights: {name} is in few bits, to which no adapter can be added here: ask for the weights "
            "without merged=True, or load the model in 16 bits"
        )
    others = {key: param for key, param in before.items() if param is not None and key != attribute}

    def beside(fill: float) -> Tensor:
        shown = {key: value.new_full(logical_shape(param), fill) for key, param in others.items()}
        return _merged_in_place(layer, {**shown, attribute: value.clone()}, attribute, name)

    found = beside(0.0)
    if value.dim() == 1 and others and not torch.equal(found, beside(1.0)):
        raise CheckpointError(
            f"merged weights: what {type(layer).__name__} makes of {name} depends on the layer's other weights, which "
            "may not be here: ask for the weights without merged=True"
        )
    return found


def _merged_in_place(layer: Any, shown: dict[str, Tensor], attribute: str, name: str) -> Tensor:
    """What PEFT's ``merge`` makes of ``attribute`` where the base of ``layer`` has ``shown``; all is then as before."""
    base = layer.get_base_layer()
    before = dict(base._parameters)
    modules = [(module, dict(module._modules)) for module in layer.modules()]
    base.__dict__.update(shown)
    try:
        with torch.no_grad():
            layer.merge(safe_merge=False)
        if layer.get_base_layer() is not base:
            raise TypeError(f"{type(layer).__name__} puts another module in its place")
        return base.__dict__[attribute].data  # type: ignore[no-any-return]
    except (RuntimeError, ValueError, NotImplementedError, KeyError, TypeError) as error:
        raise CheckpointError(f"merged weights: PEFT cannot merge the adapters of {name}: {error}") from error
    finally:
        layer.merged_adapters.clear()
        for module, children in modules:
            module._modules.update(children)
        for key in shown:
            base.__dict__.pop(key, None)
        base._parameters.update(before)


def _is_tuner(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in ("merge", "get_base_layer", "merged_adapters", "base_layer"))


def _merges(layer: Any, attribute: str) -> bool:
    active = not layer.disable_adapters and not layer.merged_adapters and layer.active_adapters
    named = getattr(layer, "parameter_name", None)  # of a layer around one parameter of stacked experts
    return bool(active) and attribute in layer.get_base_layer()._parameters and named in (None, attribute)


def _in_base(layer: Any, param: Tensor) -> bool:
    return any(param is each for each in layer.get_base_layer().parameters())


def in_buckets(weights: Iterator[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of ``weights`` of at most ``nbytes`` together, or of one that is larger; copies, so that of what they were
    gathered with nothing is held. A tensor with several names is copied once."""
    bucket: list[tuple[str, Tensor]] = []
    size, last, copy = 0, None, None
    for name, value in weights:
        if value is not last:
            if bucket and size + value.nbytes > nbytes:
                yield bucket
                bucket, size = [], 0
            last, copy = value, value.clone(memory_format=torch.contiguous_format)
            size += value.nbytes
        assert copy is not None
        bucket.append((name, copy))
    if bucket:
        yield bucket
