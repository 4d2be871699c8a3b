"""``deepspeed.module_inject.layers``: single cut layers, made of a whole one and a process group, and their names.

The engine's own cut modules (``engine/parallel/tensor/styles.py``) are instances of the classes that DeepSpeed would
have put in their place, so ``isinstance`` answers as there. Layers that are made by hand may be divided unequally.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ds_hf.deepspeed_api.checkpoint.tensor_info import collect_autotp_universal_checkpoint_info
from ds_hf.deepspeed_api.tensor_parallel import (
    AUTOTP_MODE,
    get_auto_tp_mode,
    is_autotp_training_mode,
    set_autotp_mode,
)
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.tensor.functions import Place, copy_to, gather_last, reduce_from
from ds_hf.engine.parallel.tensor.gathered import GatherReplacedLayerParams, divided_over
from ds_hf.engine.parallel.tensor.rules import Rule, sizes_of_shape
from ds_hf.engine.parallel.tensor.styles import Colwise, ColwiseFused, Rowwise, RowwiseFused, RowwiseSplit
from ds_hf.engine.zero.cut import Cut, set_cut

__all__ = [
    "AUTOTP_MODE",
    "DS_IS_REPLACED_MODULE",
    "DS_TENSOR_MODEL_PARALLEL",
    "GateUpPack_LinearLayer",
    "GatherReplacedLayerParams",
    "LinearAllreduce",
    "LinearLayer",
    "LmHeadLinearAllreduce",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "TensorParallel_Layer",
    "collect_autotp_universal_checkpoint_info",
    "get_auto_tp_mode",
    "get_shard_size",
    "get_shard_size_list",
    "is_autotp_training_mode",
    "set_autotp_mode",
]

DS_TENSOR_MODEL_PARALLEL, DS_IS_REPLACED_MODULE = "tensor_model_parallel", "ds_is_replaced_module"


def get_shard_size(
    total_size: int, mp_size: int, name: str | None = None, rank: int | None = None, mp_group: Any = None
) -> int:
    """How many of ``total_size`` process ``rank`` of ``mp_size`` has: equal parts, the first ones one more."""
    if rank is None:
        rank = dist.get_rank(mp_group)
    return total_size // mp_size + (rank < total_size % mp_size)


def get_shard_size_list(total_size: int, mp_size: int, name: str | None = None) -> list[int]:
    """Of all processes."""
    return [get_shard_size(total_size, mp_size, name, rank) for rank in range(mp_size)]


class TensorParallel_Layer(nn.Module, ABC):
    """A layer of which each process of ``mp_group`` has a part; without a group the whole.

    Attributes:
        tp_world_size, tp_index: processes, and which of them this is.
        weight, bias: the parameters of the given module, which are cut.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, module: nn.Module, mp_group: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.mp_group = mp_group
        self.name = kwargs.get("name")
        self.tp_world_size = self.world_size = 1 if mp_group is None else dist.get_world_size(mp_group)
        self.tp_index = self.rank = 0 if mp_group is None else dist.get_rank(mp_group)
        self.support_training = True
        axis = None if mp_group is None else axis_of(mp_group, "tensor")
        self.__dict__["_place"] = None if axis is None else Place(axis, str(self.name or "a layer"), [None])
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.register_parameter("bias", bias)

    def _cut(self, param: nn.Parameter, dim: int, sizes: Sequence[int]) -> None:
        place: Place | None = self.__dict__["_place"]
        if place is None:
            return
        cuts = []
        for rank in range(self.tp_world_size):
            ranges, start = [], 0
            for length in sizes:
                parts = get_shard_size_list(length, self.tp_world_size)
                if parts[rank]:
                    ranges.append((start + sum(parts[:rank]), parts[rank]))
                start += length
            cuts.append(Cut(dim, tuple(ranges), param.shape))
        param.data = cuts[self.tp_index].take(param.data).clone(memory_format=torch.contiguous_format)
        set_cut(param, cuts[self.tp_index])
        divided_over(param, place.axis, cuts)

    def gather_params(self, params_list: Sequence[Tensor | None]) -> None:
        """Make the layer's parameters whole, until ``_tp_partition``. Collective."""
        for param in params_list:
            if param is not None and hasattr(param, "gather_params"):
                param.gather_params([param])

    def _tp_partition(self, params_list: Sequence[Tensor | None]) -> None:
        for param in params_list:
            if param is not None and hasattr(param, "_tp_partition"):
                param._tp_partition([param])

    def is_training_mode(self) -> bool:
        return True

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape[-2:]
        return f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}, dtype={self.weight.dtype}"


class LinearLayer(TensorParallel_Layer):
    """A linear layer cut along its outputs.

    Args:
        module: with ``weight`` ``[outputs, inputs]`` and ``bias``.
        gather_output: every process gets all outputs.
        skip_partition: the parameters are cut already.
    """

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, mp_group, **kwargs)
        self.gather_output = gather_output
        self._orig_weight_shape = tuple(self.weight.shape)
        sizes = kwargs.get("sizes") or self.weight.shape[:1]
        self._partition_sizes = get_shard_size_list(sum(sizes), self.tp_world_size, self.name)
        for param in (self.weight, self.bias) if not skip_partition else ():
            if param is not None:
                self._cut(param, 0, sizes)

    def forward(self, input: Tensor) -> Tensor:
        place: Place | None = self.__dict__["_place"]
        if place is None:
            return linear(input, self.weight, self.bias)
        found = linear(copy_to(input, place), self.weight, self.bias)
        return self._gathered(found, place) if self.gather_output else found

    def _gathered(self, found: Tensor, place: Place) -> Tensor:
        most = max(self._partition_sizes)
        if min(self._partition_sizes) == most:
            return gather_last(found, place)
        parts = gather_last(pad(found, (0, most - found.shape[-1])), place).split(most, -1)  # type: ignore[no-untyped-call]
        return torch.cat([part[..., :n] for part, n in zip(parts, self._partition_sizes, strict=True)], -1)


class LinearAllreduce(TensorParallel_Layer):
    """A linear layer cut along its inputs, of which each process gives its part; the bias is whole and added once."""

    def __init__(self, module: nn.Module, mp_group: Any = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **kwargs)
        self._partition_sizes = get_shard_size_list(self.weight.shape[1], self.tp_world_size, self.name)
        self._orig_weight_shape = tuple(self.weight.shape)
        self._cut(self.weight, 1, kwargs.get("sizes") or self.weight.shape[1:])

    def forward(self, input: Tensor) -> Tensor:
        place: Place | None = self.__dict__["_place"]
        found = linear(input, self.weight)
        total = found if place is None else reduce_from(found, place, in_place=True)
        return total if self.bias is None else total + self.bias


class LmHeadLinearAllreduce(LinearAllreduce):
    """The same of an input that is whole."""

    def forward(self, input: Tensor) -> Tensor:
        place: Place | None = self.__dict__["_place"]
        if place is not None:
            input = copy_to(input, place).split(self._partition_sizes, -1)[self.tp_index]  # type: ignore[no-untyped-call]
        return super().forward(input)


class SubParamLinearLayer(LinearLayer):
    """A layer of several matrices, each cut along its outputs: fused queries, keys and values; gate and up.

    Args:
        shape: as in ``partition_config``: ``(2, -1)``, ``((q, k, v), -1)``.
    """

    def __init__(
        self, module: nn.Module, mp_group: Any = None, shape: Any = None, partition_dim: int = 0, **kwargs: Any
    ) -> None:
        sizes = _sizes_of(module, shape, partition_dim, 0)
        super().__init__(module, mp_group, sizes=sizes, **kwargs)
        self.shape, self.partition_dim, self._subparam_sizes = shape, partition_dim, sizes


class SubParamLinearAllreduce(LinearAllreduce):
    """A layer of several matrices, each cut along its inputs."""

    def __init__(
        self, module: nn.Module, mp_group: Any = None, shape: Any = None, partition_dim: int = 1, **kwargs: Any
    ) -> None:
        sizes = _sizes_of(module, shape, partition_dim, 1)
        super().__init__(module, mp_group, sizes=sizes, **kwargs)
        self.shape, self.partition_dim, self._subparam_sizes = shape, partition_dim, sizes


def _sizes_of(module: nn.Module, shape: Any, partition_dim: int, dim: int) -> tuple[int, ...]:
    weight: Any = module.weight
    given = tuple(tuple(each) if isinstance(each, list | tuple) else each for each in shape)
    return sizes_of_shape(Rule("", "", given, partition_dim), weight.shape, dim)


class GateUpPack_LinearLayer(LinearLayer):
    """Gate and up in one matrix."""

    def __init__(self, module: nn.Module, mp_group: Any = None, **kwargs: Any) -> None:
        weight: Any = module.weight
        super().__init__(module, mp_group, sizes=(weight.shape[0] // 2,) * 2, **kwargs)


for _name, _own in (
    (LinearLayer, Colwise),
    (SubParamLinearLayer, ColwiseFused),
    (LinearAllreduce, Rowwise),
    (SubParamLinearAllreduce, RowwiseFused),
    (LmHeadLinearAllreduce, RowwiseSplit),
):
    _name.register(_own)
