"""Rows of divided tokens on their way between processes: gathered, and summed where each has a part of the sum.

By collectives of torch; in compiled code by its functional ones, or, where the engine opened copies between the GPUs of
one host (``comm/peer_exchanges.py``), as operators that take these for large rows. The host needs longer for them than
for NCCL's one launch, and in code that is not compiled the GPUs wait for the host.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.comm.peer_exchanges import exchanges_for
from ds_hf.engine.ops.library import define

__all__ = ["gather_rows", "group_of", "sum_rows"]


def gather_rows(rows: Tensor, axis: Axis, what: str) -> Tensor:
    """``[processes * n, hidden]`` of each process's ``[n, hidden]``, contiguous."""
    if rows.is_meta:
        return rows.new_empty(axis.world_size * rows.shape[0], rows.shape[1])
    if not torch.compiler.is_compiling():
        return _gather(rows, axis, what)
    if axis.log.exchanges is None:
        return functional.all_gather_tensor(rows, 0, group_of(axis))
    return cast(Tensor, torch.ops.ds_hf.gather_rows(rows, axis.world_size, group_of(axis).group_name))


def sum_rows(rows: Tensor, axis: Axis, what: str) -> Tensor:
    """This process's ``[n, hidden]`` of the sum of ``[processes * n, hidden]``, contiguous, which may be changed."""
    if rows.is_meta:
        return rows.new_empty(rows.shape[0] // axis.world_size, rows.shape[1])
    if not torch.compiler.is_compiling():
        return _sum(rows, axis, what)
    if axis.log.exchanges is None:
        return cast(Tensor, functional.reduce_scatter_tensor(rows, "sum", 0, group_of(axis)))
    return cast(Tensor, torch.ops.ds_hf.sum_rows(rows, axis.world_size, group_of(axis).group_name))


def group_of(axis: Axis) -> dist.ProcessGroup:
    group = axis.group or dist.group.WORLD
    assert group is not None
    return group


def _gather(rows: Tensor, axis: Axis, what: str) -> Tensor:
    found = rows.new_empty(axis.world_size * rows.shape[0], rows.shape[1])
    collectives.all_gather(found.view(-1), rows.view(-1), axis, what)
    return found


def _sum(rows: Tensor, axis: Axis, what: str) -> Tensor:
    flat, hidden = rows.view(-1), rows.shape[1]
    found = collectives.reduce_gradient(flat, axis, scatter=True, scale_before=1.0, scale_after=1.0, what=what)
    return found.view(-1, hidden)


# -- operators -----------------------------------------------------------------------------------------------------
# They are not told whose tokens these are: code is compiled once for all blocks.

_OPERANDS = "(Tensor rows, int processes, str group) -> Tensor"
_WHAT = "tokens of compiled blocks"


def _axis(group: str) -> Axis:
    return axis_of(c10d._resolve_process_group(group))  # type: ignore[arg-type, attr-defined]


def _gather_here(rows: Tensor, processes: int, group: str) -> Tensor:
    axis, rows = _axis(group), rows.contiguous()
    copies = exchanges_for(axis, rows, (processes - 1) * rows.nbytes)
    return _gather(rows, axis, _WHAT) if copies is None else copies.all_gather(rows, _WHAT).view(-1, rows.shape[1])


def _sum_here(rows: Tensor, processes: int, group: str) -> Tensor:
    axis, rows = _axis(group), rows.contiguous()
    parts = rows.view(processes, -1)
    copies = exchanges_for(axis, rows, parts[1:].nbytes) if rows.itemsize <= 4 else None
    return _sum(rows, axis, _WHAT) if copies is None else copies.reduce_scatter(parts, _WHAT).view(-1, rows.shape[1])


define(
    "gather_rows",
    _OPERANDS,
    _gather_here,
    (),
    lambda rows, processes, group: rows.new_empty(processes * rows.shape[0], rows.shape[1]),
)
define(
    "sum_rows",
    _OPERANDS,
    _sum_here,
    (),
    lambda rows, processes, group: rows.new_empty(rows.shape[0] // processes, rows.shape[1]),
)
