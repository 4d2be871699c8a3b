"""``convert_conv1d_to_linear``, for scripts that call it; compression takes transformers' ``Conv1D`` as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_hf.engine.zero.buffer import home_of
from ds_hf.errors import ConfigError

__all__ = ["convert_back", "convert_conv1d_to_linear"]

_WAS = "_ds_hf_was"  # of a linear layer that was converted: the class that it had


def convert_conv1d_to_linear(model: Any, convert_type: type[nn.Module]) -> Any:
    """Put ``nn.Linear`` in the place of each ``convert_type`` of ``model``, in place (DeepSpeed's name).

    It is not needed here: ``init_compression`` takes ``Conv1D`` as it is. It transposes weights, so what is saved
    then is not what transformers loads for this model; ``redundancy_clean`` puts transformers' ``Conv1D`` back.

    Args:
        convert_type: transformers' ``Conv1D``, whose weight is ``[inputs, outputs]``.

    Raises:
        ConfigError: parameters are sharded.
    """
    module = model.module if hasattr(model, "module") else model
    for name, child in list(module.named_modules()):
        if not isinstance(child, convert_type):
            continue
        weight: Any = child.weight
        bias: Any = getattr(child, "bias", None)
        if home_of(weight) is not None:
            raise ConfigError(
                f"convert_conv1d_to_linear() of a model whose parameters are sharded ({name}): leave it out, as "
                "init_compression takes Conv1D as it is"
            )
        linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
        if bias is not None:
            linear.bias = bias
        linear.train(child.training)
        vars(linear)[_WAS] = convert_type
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, linear)
    return model


def convert_back(model: nn.Module) -> None:
    """Put what ``convert_conv1d_to_linear`` has converted back, with the present weights and sizes, in place."""
    for name, child in list(model.named_modules()):
        kind: Any = vars(child).get(_WAS)
        if kind is None or not isinstance(child, nn.Linear):
            continue
        with torch.device("meta"):
            made = kind(child.out_features, child.in_features)
        made.weight = nn.Parameter(child.weight.detach().t().contiguous(), requires_grad=child.weight.requires_grad)
        made.bias = child.bias
        made.train(child.training)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
