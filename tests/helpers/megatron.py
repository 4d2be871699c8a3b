"""A model that its author has divided over processes, and the ``mpu`` that says so, as users of Megatron-LM write."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.helpers.models import Block, TinyLM

__all__ = ["Mpu", "OldMpu", "divide", "gathered_weights", "in_parts"]


class Mpu:
    """Groups of ``tensor`` consecutive ranks that share layers, and of those that hold the same part. Collective."""

    def __init__(self, tensor: int) -> None:
        ranks = torch.arange(dist.get_world_size()).view(-1, tensor)
        self.tensor, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        self.data, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor)

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


class OldMpu:
    """The same by the older names."""

    def __init__(self, mpu: Mpu) -> None:
        self.get_model_parallel_group = mpu.get_tensor_model_parallel_group
        self.get_model_parallel_rank = mpu.get_tensor_model_parallel_rank
        self.get_model_parallel_world_size = mpu.get_tensor_model_parallel_world_size
        self.get_data_parallel_group = mpu.get_data_parallel_group
        self.get_data_parallel_rank = mpu.get_data_parallel_rank
        self.get_data_parallel_world_size = mpu.get_data_parallel_world_size


class _Copy(torch.autograd.Function):
    """To all parts; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ColumnLinear(nn.Module):
    """The part of ``whole`` that computes some of its outputs."""

    def __init__(self, whole: nn.Linear, mpu: Any) -> None:
        super().__init__()
        self.mpu = mpu
        self.weight = _part(whole.weight, 0, mpu)
        self.bias = None if whole.bias is None else _part(whole.bias, 0, mpu)

    def forward(self, x: Tensor) -> Tensor:
        return linear(_Copy.apply(x, self.mpu.get_tensor_model_parallel_group()), self.weight, self.bias)


class RowLinear(nn.Module):
    """The part of ``whole``, which has no bias, that takes some of its inputs."""

    def __init__(self, whole: nn.Linear, mpu: Any) -> None:
        super().__init__()
        self.mpu = mpu
        self.weight = _part(whole.weight, 1, mpu)

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(linear(x, self.weight), self.mpu.get_tensor_model_parallel_group())


def _part(whole: Tensor, dim: int, mpu: Any) -> nn.Parameter:
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    param = nn.Parameter(whole.detach().chunk(size, dim)[rank].clone())
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    param.partition_dim = dim  # type: ignore[attr-defined]
    param.partition_stride = 1  # type: ignore[attr-defined]
    return param


def divide(model: TinyLM, mpu: Any) -> TinyLM:
    """Divide the matrices of every block over the model-parallel group, in place; the rest stays whole."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = ColumnLinear(block.up, mpu)  # type: ignore[assignment]
        block.down = RowLinear(block.down, mpu)  # type: ignore[assignment]
    return model


def in_parts(model: TinyLM, parts: int) -> TinyLM:
    """Let one process compute the blocks as ``parts`` processes do, in place: sums over the width in as many parts. In
    another order they round otherwise, and a ``relu`` whose input is zero but for rounding makes that visible."""

    def forward(block: Block, x: Tensor) -> Tensor:
        h = block.norm(x)
        up, bias, down = block.up.weight.chunk(parts), block.up.bias.chunk(parts), block.down.weight.chunk(parts, 1)
        total = sum(linear(torch.relu(linear(h, w, b)), d) for w, b, d in zip(up, bias, down, strict=True))
        return x + total

    for block in model.blocks:
        block.forward = functools.partial(forward, block)  # type: ignore[method-assign]
    return model


def gathered_weights(weights: dict[str, Tensor], mpu: Any) -> dict[str, Tensor]:
    """``weights`` of a divided model by name, each made whole. Collective."""
    found = {}
    for name, value in weights.items():
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(".".join(name.split(".")[-2:]))
        parts = [torch.empty_like(value) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        dist.all_gather(parts, value.contiguous(), group=mpu.get_tensor_model_parallel_group())
        found[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return found
