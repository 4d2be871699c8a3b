"""Layers that compute with compressed weights and inputs, and keep their own.

A layer gets one of these classes in place of its own (``adopt``); the object, its parameters and their names stay, so
optimizers, ZeRO, checkpoints, PEFT and saving see ordinary weights. What is added are buffers: masks, and the range of
static activations.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hf.compression.compressed import Compressed, QuantAct
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.errors import ConfigError

__all__ = [
    "BNLayer_Compress",
    "ColumnParallelLinear_Compress",
    "Conv2dLayer_Compress",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "QuantAct",
    "RowParallelLinear_Compress",
    "adopt",
    "class_for",
    "is_conv1d",
    "is_linear",
    "release",
]


class LinearLayer_Compress(Compressed, nn.Linear):  # type: ignore[misc]  # noqa: N801
    """A linear layer; ``LinearLayer_Compress(in_features, out_features, bias=True)``."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        return self.computed(self._multiplied, input)

    def _multiplied(self, x: Tensor) -> Tensor:
        weight, bias = self.compressed()
        return functional.linear(self.quantized_input(x), weight, bias)


class Embedding_Compress(Compressed, nn.Embedding):  # type: ignore[misc]  # noqa: N801
    """An embedding, whose weights may be quantized and pruned one by one."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Embedding``."""
        return self.computed(self._looked_up, input)

    def _looked_up(self, ids: Tensor) -> Tensor:
        return functional.embedding(
            ids,
            self.compressed()[0],
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class Conv2dLayer_Compress(Compressed, nn.Conv2d):  # type: ignore[misc]  # noqa: N801
    """A convolution, whose outputs are channels."""

    plain = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Conv2d``."""
        return self.computed(self._convolved, input)

    def _convolved(self, x: Tensor) -> Tensor:
        weight, bias = self.compressed()
        output: Tensor = self._conv_forward(self._quantized_image(x), weight, bias)
        return output

    def _quantized_image(self, x: Tensor) -> Tensor:
        """A range for each image, where it is dynamic."""
        if not self.activation_quantization_enabled or self.has_static_range:
            return self.quantized_input(x)
        flat = x.reshape(-1, x[0].numel()) if x.dim() == 4 else x.reshape(1, -1)
        return self.quantized_input(flat).reshape(x.shape)


class BNLayer_Compress(Compressed, nn.BatchNorm2d):  # type: ignore[misc]  # noqa: N801
    """Batch norm after a convolution whose channels are pruned: it would make a constant of a channel of zeros, and
    gives zeros, so that the channel can be removed.

    Attributes:
        masked_by: the convolution, in a tuple, for it is no part of this module.
    """

    masked_by: tuple[Compressed] | tuple[()] = ()

    plain = nn.BatchNorm2d

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.BatchNorm2d``."""
        output = nn.BatchNorm2d.forward(self, input)
        for layer in self.masked_by:
            if layer.channel_pruning_enabled:
                output = output * layer.mask_of("channel").to(output.dtype).view(1, -1, 1, 1)
        return output


def _divided(name: str) -> Any:
    class Divided:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise ConfigError(
                f"{name} compresses a layer that processes divide, and masks and scales are of whole weights: compress "
                "with ZeRO's stages 1 to 3, which divide the memory and not the layers"
            )

    Divided.__name__ = Divided.__qualname__ = name
    Divided.__doc__ = "DeepSpeed's class for layers that processes divide, which are refused with the reason."
    return Divided


ColumnParallelLinear_Compress = _divided("ColumnParallelLinear_Compress")
RowParallelLinear_Compress = _divided("RowParallelLinear_Compress")


# -- transformers' Conv1D ----------------------------------------------------------------------------------------------


def _conv1d() -> Any:
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer of transformers, whose weight is ``[inputs, outputs]``."""
    kind = _conv1d()
    return kind is not None and isinstance(module, kind)


def is_linear(module: nn.Module) -> bool:
    """A linear layer of torch or of transformers."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


class _Transposed(Compressed):
    out_dim = 1

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.t()

    def _matrix_shape(self) -> torch.Size:
        return torch.Size(reversed(logical_shape(self.weight)))

    def forward(self, x: Tensor) -> Tensor:
        """As transformers' ``Conv1D``."""
        return self.computed(self._multiplied, x)

    def _multiplied(self, x: Tensor) -> Tensor:
        weight, bias = self.compressed()
        return functional.linear(self.quantized_input(x), weight, bias)


@cache
def _transposed_class(kind: Any) -> Any:
    name = "Conv1DLayer_Compress"
    return type(name, (_Transposed, kind), {"plain": kind, "__module__": __name__, "__doc__": kind.__doc__})


def __getattr__(name: str) -> Any:
    """``Conv1DLayer_Compress`` is made where transformers is there, so that a pickle finds it."""
    kind: Any = _conv1d() if name == "Conv1DLayer_Compress" else None
    if kind is None:
        raise AttributeError(name)
    return _transposed_class(kind)


# -- taking the place --------------------------------------------------------------------------------------------------

_OWN_CLASSES: tuple[type[Compressed], ...] = (
    LinearLayer_Compress,
    Embedding_Compress,
    Conv2dLayer_Compress,
    BNLayer_Compress,
)
_CLASSES: dict[type[nn.Module], type[Compressed]] = {kind.plain: kind for kind in _OWN_CLASSES}


def class_for(module: nn.Module) -> type[Compressed] | None:
    """The class that ``module`` would take; ``None`` for a layer that cannot be compressed."""
    if isinstance(module, Compressed):
        return type(module)
    kind: Any = type(module)
    if kind is _conv1d():
        made: type[Compressed] = _transposed_class(kind)
        return made
    return _CLASSES.get(kind)


def adopt(module: nn.Module, name: str = "") -> Compressed:
    """Make ``module`` a compressed layer, in place; ``name`` is its name in the model.

    Raises:
        ConfigError: it is none that can be compressed.
    """
    kind: Any = class_for(module)
    if kind is None:
        raise ConfigError(f"{name or 'a layer'} is a {type(module).__name__}, which cannot be compressed")
    if not isinstance(module, Compressed):
        module.__class__ = kind
    assert isinstance(module, Compressed)
    module.full_name = name
    return module


_OF_BUFFERS = tuple(f"{what}_pruning_mask" for what in ("sparse", "row", "head", "channel"))
_OF_SCORES = tuple(f"{what}_mask_scores" for what in ("sparse", "row", "head", "channel"))


def release(module: Compressed) -> None:
    """Make it a layer of its own class again, without masks, scores and ranges."""
    for name in _OF_BUFFERS:
        module._buffers.pop(name, None)
    for name in _OF_SCORES:
        module._parameters.pop(name, None)
    module._modules.pop("activation_quantizer", None)
    for name in list(vars(module)):
        if name in _OWN or name.rpartition("_pruning_")[1] or name.startswith(("weight_quantiz", "activation_")):
            del module.__dict__[name]
    kind: Any = module.plain
    module.__class__ = kind


_OWN = {
    *("full_name", "weight_bits", "target_bits", "quantization_period", "rounds_by_chance", "mixed", "step"),
    "recomputes",
    *("has_static_range", "num_heads", "masked_by"),
}
