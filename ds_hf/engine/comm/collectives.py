"""Every collective the engine issues on model states, all in one file.

Shapes: ``full`` is ``[world_size * n]``, ``shard`` is ``[n]``; both flat, contiguous and of one dtype. With one
process nothing is communicated and ``full`` may be the very tensor ``shard``. ``what`` says in the log of the axis, by
which hangs are explained, whose values they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm.comms_logger import comms_logger
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import CommStream

__all__ = [
    "all_gather",
    "all_gather_each",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "reduce_gradient",
    "spread",
]

# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

EXCHANGED_NBYTES = 4 << 20  # of a gradient that two processes exchange: for more, bytes count and not the ways
_EXCHANGE = 0x6473  # the tag of such messages


def all_gather(full: Tensor, shard: Tensor, axis: Axis, what: str = "", comm_stream: CommStream | None = None) -> None:
    """Fill ``full``, ``[numel]``, with every rank's ``shard`` of the same dtype, which may be this rank's slice of
    ``full``.

    Args:
        comm_stream: on the CPU the gather may still be under way on it; it must ``arrive`` before ``full`` is read.
    """
    if axis.world_size == 1:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return
    _issue(_all_gather, "all-gather", what, shard, axis, comm_stream, full, shard)


def all_gather_each(fulls: Sequence[Tensor], shards: Sequence[Tensor], axis: Axis, whats: Sequence[str]) -> None:
    """``all_gather`` of each, flat and of any dtypes: with NCCL in one launch (each costs the host 27 microseconds, or
    5 in a group), with gloo all under way at once, so that ranks wait for each other once.

    While collectives are measured they are launched one by one.
    """
    if axis.world_size == 1 or len(fulls) <= 1 or comms_logger.enabled or not _is_nccl(fulls[0], axis):
        under_way = CommStream()
        for full, shard, what in zip(fulls, shards, whats, strict=True):
            all_gather(full, shard, axis, what, under_way)
        under_way.arrive()
        return
    for shard, what in zip(shards[:-1], whats[:-1], strict=True):
        axis.log("all-gather", what, shard)
    group = dist.group.WORLD if axis.group is None else axis.group
    assert group is not None
    with axis.log("all-gather", whats[-1], shards[-1]):
        group.allgather_into_tensor_coalesced(list(fulls), list(shards)).wait()


def reduce_gradient(
    full: Tensor,
    axis: Axis,
    *,
    scatter: bool,
    scale_before: float,
    scale_after: float,
    what: str = "",
    comm_stream: CommStream | None = None,
    others: Axis | None = None,
) -> Tensor:
    """Sum ``full``, ``[numel]``, over the axis, and what is left of it over ``others``; return this rank's shard of it
    (``scatter``) or all of it.

    ``scale_before`` multiplies before the sum: fp16 sums overflow otherwise. ``full`` is consumed.

    Args:
        comm_stream: on the CPU the sum may still be under way on it; it must ``arrive`` before the result is read.
        others: processes with the same shard, whose processes of the axis are others.
    """
    if others is not None:
        comm_stream = None  # the second sum reads the first
    summed = axis.world_size * (others.world_size if others is not None else 1)
    op = dist.ReduceOp.SUM
    if scale_before == 1 / summed and summed > 1 and _is_nccl(full, axis):
        op = dist.ReduceOp.AVG  # multiplies each summand while it reads it: saves a pass over the gradients
    elif scale_before != 1.0:
        full.mul_(scale_before)
    result = full
    if axis.world_size > 1:
        beside = comm_stream if scale_after == 1.0 else None
        if beside is not None and _exchanges(full, axis):
            return _exchange(full, axis, scatter, what, beside)
        if scatter:
            result = full.new_empty(full.numel() // axis.world_size)
            _issue(_reduce_scatter, "reduce-scatter", what, result, axis, beside, result, full, op=op)
        else:
            _issue(dist.all_reduce, "all-reduce", what, full, axis, beside, full, op=op)
    if others is not None and others.world_size > 1:
        _issue(dist.all_reduce, "all-reduce", what, result, others, None, result, op=op)
    return result.mul_(scale_after) if scale_after != 1.0 else result


def spread(second: Tensor, shard: Tensor, axis: Axis, inner: Axis, what: str = "") -> None:
    """Fill ``second``, this rank's part of what the processes of ``inner`` divide, with the shards of ``axis`` in it.

    ``inner`` are neighbours on the axis, which it divides: with two parts of two, ranks 0 and 2 get the shards 0 and 1,
    and ranks 1 and 3 the shards 2 and 3.

    Args:
        second: ``[n * parts]``; shard: ``[n]``; one dtype.
    """
    parts = axis.world_size // inner.world_size
    wanted_by = axis.rank // parts  # place along ``inner`` of those that want this rank's shard
    n = shard.numel()
    sent = [n * (rank % inner.world_size == wanted_by) for rank in range(axis.world_size)]
    received = [n * (rank // parts == inner.rank) for rank in range(axis.world_size)]
    with axis.log("all-to-all", what, second):
        dist.all_to_all_single(second, shard.repeat(parts), received, sent, group=axis.group)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    axis: Axis,
    what: str = "",
    received_sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
    comm_stream: CommStream | None = None,
    beside: Callable[[], Any] | None = None,
) -> None:
    """Fill ``received`` with what every process of the axis has for this one; by default equally much of dimension 0.
    The other dimensions of its shape and the dtype are those of ``sent``.

    Args:
        comm_stream: on the CPU it may still be under way on it, if sizes are equal; it must ``arrive`` before.
        beside: is called while it is under way.
    """
    if comm_stream is not None:
        _issue(dist.all_to_all_single, "all-to-all", what, received, axis, comm_stream, received, sent)
        return
    noted = received if received_sizes is None else None  # else it differs from process to process
    with axis.log("all-to-all", what, noted):
        work = dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=axis.group, async_op=beside is not None
        )
        if beside is not None:
            beside()
            work.wait()


def _exchanges(full: Tensor, axis: Axis) -> bool:
    small = full.nbytes <= EXCHANGED_NBYTES and not full.is_cuda
    return small and axis.world_size == 2 and not comms_logger.enabled and dist.get_backend(axis.group) == "gloo"


def _exchange(full: Tensor, axis: Axis, scatter: bool, what: str, comm_stream: CommStream) -> Tensor:
    """The sum over two processes, under way on ``comm_stream``: each sends the other what that one keeps.

    To the bit what gloo gives, since one addition has no order. Gloo's reduce-scatter sums everything everywhere and
    takes three times as long, most of which is waiting.
    """
    kept, sent = (full.view(2, -1)[axis.rank], full.view(2, -1)[1 - axis.rank]) if scatter else (full, full)
    total = torch.empty_like(kept)
    other = 1 - axis.rank
    with axis.log("reduce-scatter" if scatter else "all-reduce", what, total):
        received = dist.irecv(total, group=axis.group, tag=_EXCHANGE, group_src=other)
        left = dist.isend(sent, group=axis.group, tag=_EXCHANGE, group_dst=other)

    def over() -> None:
        for work in (received, left):
            if work is not None:
                work.wait()
        total.add_(kept)

    comm_stream.await_later(axis.log.waiting(over), full.nbytes + total.nbytes)
    return total


def _issue(
    call: Any,
    operation: str,
    what: str,
    noted: Tensor,
    axis: Axis,
    comm_stream: CommStream | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Note a collective and issue it; on the CPU ``comm_stream`` may wait for it, unless collectives are measured."""
    if comm_stream is None or noted.is_cuda or comms_logger.enabled:
        with axis.log(operation, what, noted):
            call(*args, **kwargs, group=axis.group)
        return
    with axis.log(operation, what, noted):
        work = call(*args, **kwargs, group=axis.group, async_op=True)
    comm_stream.await_later(axis.log.waiting(work.wait), sum(each.nbytes for each in args))


def _is_nccl(tensor: Tensor, axis: Axis) -> bool:
    return tensor.is_cuda and dist.get_backend(axis.group) == "nccl"


def all_reduce_sum(tensor: Tensor, axis: Axis, what: str = "") -> Tensor:
    """Sum a small tensor of any shape and dtype over the axis, in place."""
    if axis.world_size > 1:
        with axis.log("all-reduce", what, tensor):
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def all_reduce_max(tensor: Tensor, axis: Axis, what: str = "") -> Tensor:
    """Maximum of a small tensor of any shape and dtype over the axis, in place."""
    if axis.world_size > 1:
        with axis.log("all-reduce (max)", what, tensor):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)
    return tensor


def broadcast(tensor: Tensor, axis: Axis, source: int = 0, what: str = "") -> None:
    """Copy ``tensor``, of one shape and dtype everywhere, of the rank ``source`` of the axis to all, in place."""
    if axis.world_size > 1:
        with axis.log("broadcast", what, tensor):
            dist.broadcast(tensor, axis.global_rank(source), group=axis.group)


def barrier(axis: Axis) -> None:
    """Wait for every process of the axis."""
    if axis.world_size > 1:
        with axis.log("barrier", "the processes"):
            if torch.cuda.is_available() and dist.get_backend(axis.group) == "nccl":
                dist.barrier(group=axis.group, device_ids=[torch.cuda.current_device()])
            else:
                dist.barrier(group=axis.group)
