"""Items grouped by where they go: routes by their expert, and tokens by the processes that have experts of theirs.

Kernels of ``csrc/cuda/routes.cu``, two launches for what takes torch's operators some thirty; the latter where those
cannot run (the CPU, tensors without values, more than 1,024 groups), and to the same result.

Nothing here is differentiable, nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint64
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_hf.engine.ops import cuda, cuda_launch, library
from ds_hf.engine.ops.cuda_launch import KernelMachine, Tuning

__all__ = ["Groups", "group", "group_by_process", "label", "pick", "unlabel", "unpick"]

TUNING = Tuning(threads=256, blocks=4)
_STEPS = 4  # items of a thread, as in routes.cu
_WAVES = 8
_LEAST_BINS, _MOST_BINS = 32, 1024


class Groups(NamedTuple):
    """Items, each of which has a group or none, in the order of their groups and then of their numbers.

    An item is ``place * each + which``. Of ``order``, ``place``, ``group`` and ``by_place`` the first ``m`` count,
    where ``m`` items have a group.

    Attributes:
        order: int64 ``[n]``: the items.
        place: int64 ``[n]``: their places.
        group: int64 ``[n]``: their groups.
        by_place: int64 ``[n]``: where in ``order`` the items are, by place.
        starts: int64 ``[places]``: where those of each place begin in ``by_place``.
        number: int64 ``[places * each]``: where each item is in ``order``; -1 for those of no group.
        totals: int64 ``[groups]``: how many items each has; ``[processes, 2]`` by ``group_by_process``.
        ends: int32 ``[groups]``: sums of them, up to and with each; empty by ``group_by_process``.
    """

    order: Tensor
    place: Tensor
    group: Tensor
    by_place: Tensor
    starts: Tensor
    number: Tensor
    totals: Tensor
    ends: Tensor

    def first(self, count: int) -> Groups:
        """With the ``count`` items that have a group alone."""
        order, place, group, by_place = (each[:count] for each in self[:4])
        return self._replace(order=order, place=place, group=group, by_place=by_place)


def group(keys: Tensor, groups: int) -> Groups:
    """By their numbers ``keys``, of a whole dtype, ``[places, each]``; others than ``range(groups)`` have no group."""
    if torch.compiler.is_compiling():
        return Groups(*torch.ops.ds_hf.group_items(keys, groups))
    if not _by_kernel(keys, groups):
        return _grouped(keys, groups)
    found = _empty(keys, keys.shape[1], groups)
    _launch_group(keys, found, keys.shape[1], groups)
    return found


def _group_apart(keys: Tensor, groups: int) -> Groups:
    """``group`` in memory of their own each, as graphs want what an operator returns."""
    if not _by_kernel(keys, groups):
        return _grouped(keys, groups)
    found = _empty_apart(keys, groups)
    _launch_group(keys, found, keys.shape[1], groups)
    return found


def _empty_apart(keys: Tensor, groups: int) -> Groups:
    places, each = keys.shape
    sizes = [places * each] * 4 + [places, places * each, groups]
    numbers = [keys.new_empty(size, dtype=torch.int64) for size in sizes]
    order, place, found, by_place, starts, number, totals = numbers
    ends = keys.new_empty(groups, dtype=torch.int32)
    return Groups(order, place, found, by_place, starts, number, totals, ends)


library.define(
    "group_items",
    f"(Tensor keys, int groups) -> ({', '.join('Tensor' for _ in Groups._fields)})",
    _group_apart,
    (),
    _empty_apart,
)


def group_by_process(experts: Tensor, count: int, rank: int, size: int) -> Groups:
    """Tokens by the processes that have at least one of their experts. Items of a place are the ``size`` processes, the
    others in their order and ``rank`` the last.

    Args:
        experts: int64 ``[tokens, k]``, their numbers in the model, of which each process has ``count``; others: none.

    Returns:
        groups whose ``totals``, ``[size, 2]``, say by rank how many tokens a process gets, and of how many routes.
    """
    if not _by_kernel(experts, size):
        order = torch.tensor([*(each for each in range(size) if each != rank), rank], device=experts.device)
        owner = (experts.long() // count).masked_fill((experts < 0) | (experts >= count * size), size)
        routes = owner.new_zeros(len(owner), size + 1).scatter_add_(1, owner, torch.ones_like(owner))[:, order]
        keys = torch.where(routes > 0, torch.arange(size, device=experts.device), size)
        totals = torch.stack([(routes > 0).sum(0), routes.sum(0)], 1)
        return _grouped(keys, size)._replace(totals=torch.zeros_like(totals).index_copy_(0, order, totals))
    found = _empty(experts, size, size)._replace(totals=experts.new_empty(size, 2, dtype=torch.int64))
    _launch_group(experts, found, size, size, count=count, me=rank)
    return found


def label(values: Tensor, experts: Tensor, order: Tensor, count: int, rank: int, size: int) -> Tensor:
    """What goes with the rows of ``group_by_process``, ``[rows, 2 * k]`` of the dtype of ``values``: as bits the
    numbers that the process there gives the token's experts, ``count`` for others; then ``values``, 0 for them.

    Args:
        values: ``[tokens, k]``, contiguous; experts: int64 ``[tokens, k]``, contiguous; order: as in ``Groups``.
    """
    k = experts.shape[1]
    if _by_copies(values, len(order)):
        out = values.new_empty(len(order), 2 * k)
        _launch_labels("label", out, out.numel() // 2, size, values, experts, order=order, k=k, count=count, me=rank)
        return out
    token, process = order // size, order % size
    process = (process + (process >= rank)).masked_fill(process == size - 1, rank)
    inside = experts[token] - process[:, None] * count
    elsewhere = (inside < 0) | (inside >= count)
    numbers = inside.masked_fill(elsewhere, count).to(BITS[values.dtype.itemsize]).view(values.dtype)
    return torch.cat([numbers, values[token].masked_fill(elsewhere, 0)], 1)


def unlabel(grad: Tensor, experts: Tensor, number: Tensor, count: int, rank: int, size: int) -> Tensor:
    """The gradient of ``label``'s ``values``, ``[tokens, k]``, from ``[rows, 2 * k]``, same dtype, contiguous."""
    k = experts.shape[1]
    if _by_copies(grad, experts.numel()):
        out = grad.new_empty(experts.shape)
        _launch_labels("unlabel", out, out.numel(), size, grad, experts, number=number, k=k, count=count, me=rank)
        return out
    owner = experts // count
    none = (experts < 0) | (owner >= size)
    place = (owner - (owner > rank).long()).masked_fill(owner == rank, size - 1).masked_fill(none, 0)
    row = number.view(-1, size).gather(1, place).masked_fill(none, len(grad))
    return torch.cat([grad[:, k:], grad.new_zeros(1, k)]).gather(0, row)


def pick(values: Tensor, order: Tensor, each: int, offset: int) -> Tensor:
    """Each item's of ``values``, ``[places, width]``, any dtype, contiguous, from column ``offset`` on: ``[items]``."""
    if _by_copies(values, len(order)):
        out = values.new_empty(len(order))
        _launch_labels("pick", out, len(out), each, values, order=order, stride=values.shape[1], offset=offset)
        return out
    return values[:, offset : offset + each].reshape(-1)[order]


def unpick(grad: Tensor, number: Tensor, each: int, offset: int, width: int) -> Tensor:
    """The gradient of ``pick``'s ``values``, ``[places, width]``, from ``grad``: ``[items]``, any dtype, contiguous."""
    places = len(number) // each
    if _by_copies(grad, places * width):
        out = grad.new_empty(places, width)
        _launch_labels("unpick", out, out.numel(), each, grad, number=number, stride=width, offset=offset)
        return out
    found = torch.cat([grad, grad.new_zeros(1)])[number]  # -1: the zero
    return F.pad(found.view(places, each), (offset, width - offset - each))


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a dtype: what numbers of experts are as they travel beside it."""


def _grouped(keys: Tensor, groups: int) -> Groups:
    """``group`` by torch's operators."""
    places, each = keys.shape
    flat = keys.reshape(-1).long()
    flat = flat.masked_fill((flat < 0) | (flat >= groups), groups)
    found, order = torch.sort(flat, stable=True)
    there = flat < groups
    number = torch.empty_like(flat)
    number[order] = torch.arange(len(flat), device=flat.device)
    by_place = number[torch.argsort(~there, stable=True)]
    numbers = there.view(places, each).sum(1)
    totals = flat.new_zeros(groups + 1).scatter_add_(0, flat, torch.ones_like(flat))[:groups]
    return Groups(
        order,
        order // max(each, 1),
        found,
        by_place,
        numbers.cumsum(0) - numbers,
        number.masked_fill(~there, -1),
        totals,
        totals.cumsum(0).to(torch.int32),
    )


# -- kernels -------------------------------------------------------------------------------------------------------


class _Routes(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("experts", "tiles", *Groups._fields)),
        *((name, c_int64) for name in ("places", "k", "stride", "each", "bins", "count", "me")),
    )


class _Labels(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("experts", "values", "out", "order", "number")),
        *((name, c_int64) for name in ("rows", "places", "k", "stride", "each", "count", "me", "offset")),
    )


def _by_kernel(keys: Tensor, groups: int) -> bool:
    return keys.is_cuda and _fits(keys, groups) and cuda.available() is None


def _fits(keys: Tensor, groups: int) -> bool:
    alike = keys.dtype in BITS.values() and keys.stride(-1) == 1
    return bool(keys.numel()) and alike and 0 < groups <= _MOST_BINS and not torch.compiler.is_compiling()


def _by_copies(values: Tensor, count: int) -> bool:
    return values.is_cuda and count > 0 and not torch.compiler.is_compiling() and cuda.available() is None


def _empty(keys: Tensor, each: int, groups: int) -> Groups:
    places = len(keys)
    n = places * each
    numbers = keys.new_empty(5 * n + places + groups, dtype=torch.int64)
    order, place, found, by_place, number, starts, totals = torch.split(numbers, [n] * 5 + [places, groups])
    ends = keys.new_empty(groups, dtype=torch.int32)
    return Groups(order, place, found, by_place, starts, number, totals, ends)


def _launch_group(keys: Tensor, found: Groups, each: int, groups: int, **more: int) -> None:
    machine: KernelMachine = cuda_launch.machine_of(keys)
    owners, bins = int("count" in more), max(_LEAST_BINS, 1 << (groups - 1).bit_length())
    macros = (*TUNING.macros, ("DS_KEY", keys.dtype.itemsize), ("DS_BINS", bins), ("DS_OWNERS", owners))
    tiles = -(-len(found.number) // (TUNING.threads * _STEPS))
    counts = keys.new_empty(tiles * (1 + owners) * bins, dtype=torch.int32)
    pointers = {name: each_of.data_ptr() for name, each_of in zip(Groups._fields, found, strict=True)}
    shape = {"places": len(keys), "k": keys.shape[1], "stride": keys.stride(0), "each": each, "bins": groups}
    args = _Routes(experts=keys.data_ptr(), tiles=counts.data_ptr(), **pointers, **shape, **more)
    for name in ("count_items", "group_items"):
        machine.launch(machine.kernel("routes.cu", name, macros), tiles, TUNING.threads, [args])


def _launch_labels(
    name: str,
    out: Tensor,
    work: int,
    each: int,
    values: Tensor,
    experts: Tensor | None = None,
    order: Tensor | None = None,
    number: Tensor | None = None,
    **more: int,
) -> None:
    machine: KernelMachine = cuda_launch.machine_of(values)
    kernel = machine.kernel("routes.cu", name, (*TUNING.macros, ("DS_KEY", values.dtype.itemsize)))
    given = {"experts": experts, "values": values, "out": out, "order": order, "number": number}
    pointers = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in given.items()}
    args = _Labels(**pointers, rows=len(out), places=len(out), each=each, **more)
    grid = min(-(-work // TUNING.threads), machine.multiprocessors * TUNING.blocks * _WAVES)
    machine.launch(kernel, grid, TUNING.threads, [args])
