"""``deepspeed.runtime.utils``: memory, norms, overflow, partitions."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.parallel.pipeline.partition import partition_balanced, partition_uniform
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.cut import is_marked as is_model_parallel_parameter
from ds_hf.log import logger

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_only_unique_item",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "memory_status",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]

F = TypeVar("F", bound=Callable[..., Any])
GIB = 2**30


class DummyOptim:
    """Stands for an optimizer where there are only parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.param_groups = [{"params": params}]


class CheckOverflow:
    """Whether a gradient of some parameters is inf or nan, on any rank."""

    def __init__(self, param_groups: Sequence[Iterable[Tensor]] | None = None, mpu: Any = None, **_: Any) -> None:
        self.mpu = mpu
        self.params = [param for group in param_groups or () for param in group]

    def check(self, param_groups: Sequence[Iterable[Tensor]] | None = None) -> bool:
        """Look at ``param_groups``, or at those given at construction. Collective."""
        params = self.params if param_groups is None else [param for group in param_groups for param in group]
        return self.has_overflow(params)

    def check_using_norm(self, norm_group: Sequence[float], reduce_overflow: bool = True) -> bool:
        """Whether one of these norms says so; DeepSpeed marks an overflow by -1."""
        return self._anywhere(any(norm == -1 or not math.isfinite(norm) for norm in norm_group), reduce_overflow)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient of ``params`` is not finite, on any rank. Collective."""
        return self._anywhere(self.has_overflow_serial(params))

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """The same on this rank alone."""
        return any(has_inf_or_nan(param.grad) for param in params if param.grad is not None)

    def _anywhere(self, here: bool, reduce: bool = True) -> bool:
        if not reduce or not dist.is_initialized():
            return here
        flag = torch.tensor([float(here)], device=get_accelerator().current_device_name())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def has_inf_or_nan(x: Tensor) -> bool:
    """Whether ``x`` has an element that is not finite."""
    return not bool(torch.isfinite(x).all())


def mask_nan_or_inf_with_val_inplace(tensor: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Put ``val`` in place of elements that are not finite."""
    tensor.masked_fill_(~torch.isfinite(tensor), val)


# -- norms ------------------------------------------------------------------------------------------------------------


def get_global_norm(norm_list: Iterable[float]) -> float:
    """L2 norm of several norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor | None], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> float:
    """Norm of all elements of the tensors together, over the model-parallel group of ``mpu``."""
    return _norm([tensor for tensor in input_tensors if tensor is not None], norm_type, mpu)


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Norm of the parameters, over the model-parallel group of ``mpu``; the mean of all processes. Collective."""
    return _mean(_norm([parameter.data for parameter in _listed(parameters)], norm_type, mpu))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale gradients in place to a norm of at most ``max_norm``; returns the norm before.

    With experts among them (``param.allreduce`` is False), which differ between processes, the mean of their norms.

    Raises:
        RuntimeError: the parameters belong to an engine, which keeps their gradients and clips by itself.
    """
    listed = _listed(parameters)
    if any(home_of(parameter) is not None for parameter in listed):
        raise RuntimeError(
            "these parameters belong to an engine, which clips by itself: set gradient_clipping in the configuration"
        )
    grads = [parameter.grad for parameter in listed if parameter.grad is not None]
    norm = _norm(grads, norm_type, mpu)
    if not all(getattr(parameter, "allreduce", True) for parameter in listed):
        norm = _mean(norm)
    _scale(grads, float(max_norm), norm, 1e-6)
    return torch.tensor(norm, device=grads[0].device if grads else "cpu")


def clip_tensors_by_global_norm(
    input_tensors: Iterable[Tensor], max_norm: float = 1.0, global_norm: float | None = None, mpu: Any = None,
    eps: float = 1e-6,
) -> float:  # fmt: skip
    """Scale tensors in place to a norm of at most ``max_norm``; returns the norm before."""
    tensors = list(input_tensors)
    norm = _norm(tensors, 2, mpu) if global_norm is None else float(global_norm)
    _scale(tensors, max_norm, norm, eps)
    return norm


def _scale(tensors: list[Tensor], max_norm: float, norm: float, eps: float) -> None:
    factor = max_norm / (norm + eps)
    if factor < 1:
        for tensor in tensors:
            tensor.detach().mul_(factor)


def _norm(tensors: list[Tensor], norm_type: float, mpu: Any) -> float:
    power = float(norm_type)
    device = tensors[0].device if tensors else torch.device("cpu")
    norms = [torch.linalg.vector_norm(tensor.detach().float(), power).to(device) for tensor in tensors]
    infinite = math.isinf(power)
    if not norms:
        total = torch.zeros((), device=device)
    elif infinite:
        total = torch.stack(norms).max()
    else:
        total = torch.stack(norms).pow(power).sum()
    if mpu is not None:
        op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return float(total) if infinite else float(total) ** (1.0 / power)


def _mean(norm: float) -> float:
    """Over all processes, as DeepSpeed's functions have it, so that all scale alike."""
    if not dist.is_initialized():
        return norm
    total = torch.tensor([norm], device=get_accelerator().current_device_name())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


# -- memory -----------------------------------------------------------------------------------------------------------


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log what device and host hold, if ``force``, on the given ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not force or rank not in ranks:
        return
    gc.collect()
    device, host = get_accelerator(), psutil.virtual_memory()
    logger.info("%s", message)
    logger.info(
        "MA %.2f GB  Max_MA %.2f GB  CA %.2f GB  Max_CA %.2f GB",
        device.memory_allocated() / GIB, device.max_memory_allocated() / GIB,
        device.memory_reserved() / GIB, device.max_memory_reserved() / GIB,
    )  # fmt: skip
    logger.info("CPU virtual memory: used %.2f GB, percent %.1f%%", host.used / GIB, host.percent)
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log what the device holds, on one rank or (-1) on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = get_accelerator()
    if reset_max:
        device.reset_peak_memory_stats()
    if print_rank in (-1, rank):
        held, peak = device.memory_allocated() / GIB, device.max_memory_allocated() / GIB
        logger.info("rank %d: memory %s: allocated %.3f GB, peak %.3f GB", rank, msg, held, peak)


def empty_cache() -> None:
    """Give the device's cached blocks back."""
    get_accelerator().empty_cache()


# -- partitions -------------------------------------------------------------------------------------------------------


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Running sums, each with its own element."""
    return list(itertools.accumulate(weights))


class PartitionedTensor:
    """The elements of a tensor, in order, divided over the processes of ``group``; the first parts may be one longer.

    Args:
        tensor: the same on all processes of the group; its values are copied.
        group: process group, ``None`` for all processes.

    Attributes:
        num_parts, rank: of the group. orig_size, orig_device: of the tensor.
        local_data: this process's part, [local]. partition: where the parts start, and the end.
        even_split: whether all parts are equally long.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Tensor | None = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.local_data, self.partition = self._partition_tensor(tensor)
        self.even_split = tensor.numel() % self.num_parts == 0

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """The tensor whose ``to_meta()`` is ``meta``, of the part that this process has.

        Args:
            device: where ``full()`` lies, default that of the part.

        Raises:
            ValueError: ``meta`` is none, or speaks of another group or another part.
        """
        found = cls.__new__(cls)
        found.group, found.local_data = group, local_part
        found.orig_device = local_part.device if device is None else torch.device(device)
        dims, *rest = meta.tolist() or [0]
        found.orig_size, rest = rest[:dims], rest[dims:]
        if len(rest) < 2 or len(rest) != rest[0] + 3:
            raise ValueError(f"not what to_meta() gives: {meta.tolist()!r:.120}")
        found.num_parts, found.rank, found.partition = rest[0], rest[1], rest[2:]
        here = (dist.get_world_size(group), dist.get_rank(group))
        if here != (found.num_parts, found.rank):
            raise ValueError(
                f"part {found.rank} of {found.num_parts} is not that of process {here[1]} of the {here[0]} "
                "in this group: give from_meta() the group of the PartitionedTensor"
            )
        wanted = found.partition[found.rank + 1] - found.partition[found.rank]
        if local_part.numel() != wanted:
            raise ValueError(f"local_part has {local_part.numel()} elements, and the part that meta describes {wanted}")
        found.even_split = found.partition[-1] % found.num_parts == 0
        return found

    def _partition_tensor(self, tensor: Tensor) -> tuple[Tensor, list[int]]:
        partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = partition[self.rank : self.rank + 2]
        return tensor.detach().reshape(-1)[start:stop].clone(), partition

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor. Collective.

        Args:
            device: default that of the tensor it was made of.
        """
        sizes = [stop - start for start, stop in itertools.pairwise(self.partition)]
        own = self.local_data.new_zeros(max(sizes))
        own[: self.local_data.numel()] = self.local_data.reshape(-1)
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=self.group)
        gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return gathered.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        """What ``from_meta`` needs besides the part: dimensions, sizes, parts, rank, partition, int64."""
        meta = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(meta, dtype=torch.int64, device=self.orig_device)

    def data(self) -> Tensor:
        """This process's part, [local]."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Of this process's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Of the whole tensor."""
        return self.orig_size

    def __repr__(self) -> str:
        kept = f"{self.local_data.numel()} of {math.prod(self.orig_size)} elements"
        return f"PartitionedTensor({self.orig_size}, part {self.rank} of {self.num_parts}: {kept})"


# -- odds and ends ----------------------------------------------------------------------------------------------------


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """``item`` with its tensors on ``device``, through lists, tuples and dicts; ``criterion_func`` may choose them."""
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return type(item)(*moved) if hasattr(item, "_fields") else type(item)(moved)
    wanted = criterion_func(item) if criterion_func is not None else isinstance(item, Tensor)
    return item.to(device) if wanted and hasattr(item, "to") else item


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """``base(arg, key=value)`` as text."""
    parts = [*(repr(arg) for arg in args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(parts)})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The one value that all items are.

    Raises:
        RuntimeError: there are none, or different ones.
    """
    different = set(items)
    if len(different) != 1:
        raise RuntimeError(f"expected one value and found {len(different)}: {different}")
    return different.pop()


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that the file lies in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def noop_decorator(func: F) -> F:
    """The function as it is."""
    return func


@contextmanager
def noop_context() -> Iterator[None]:
    """Changes nothing."""
    yield
