"""Rows of divided tokens on their way between processes: gathered, and summed where each has a part of the sum.

Large ones go by copies between the GPUs of one host where the engine opened them (``comm/peer_exchanges.py``), others
by collectives of torch. In compiled code the former are operators, which find their axis by the name of its group;
without copies it gets torch's functional collectives, see ``functions``.
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
    return cast(Tensor, torch.ops.ds_hf.gather_rows(rows, axis.world_size, group_of(axis).group_name, what))


def sum_rows(rows: Tensor, axis: Axis, what: str) -> Tensor:
    """This process's ``[n, hidden]`` of the sum of ``[processes * n, hidden]``, contiguous, which may be changed."""
    if rows.is_meta:
        return rows.new_empty(rows.shape[0] // axis.world_size, rows.shape[1])
    if not torch.compiler.is_compiling():
        return _sum(rows, axis, what)
    if axis.log.exchanges is None:
        return cast(Tensor, functional.reduce_scatter_tensor(rows, "sum", 0, group_of(axis)))
    return cast(Tensor, torch.ops.ds_hf.sum_rows(rows, axis.world_size, group_of(axis).group_name, what))


def group_of(axis: Axis) -> dist.ProcessGroup:
    group = axis.group or dist.group.WORLD
    assert group is not None
    return group


def _gather(rows: Tensor, axis: Axis, what: str) -> Tensor:
    copies = exchanges_for(axis, rows, (axis.world_size - 1) * rows.nbytes)
    if copies is not None:
        return copies.all_gather(rows, what).view(-1, rows.shape[1])
    found = rows.new_empty(axis.world_size * rows.shape[0], rows.shape[1])
    collectives.all_gather(found.view(-1), rows.view(-1), axis, what)
    return found


def _sum(rows: Tensor, axis: Axis, what: str) -> Tensor:
    parts, hidden = rows.view(axis.world_size, -1), rows.shape[1]
    copies = exchanges_for(axis, rows, parts.nbytes - parts[0].nbytes) if rows.itemsize <= 4 else None
    if copies is not None:
        return copies.reduce_scatter(parts, what).view(-1, hidden)
    found = collectives.reduce_gradient(rows.view(-1), axis, scatter=True, scale_before=1.0, scale_after=1.0, what=what)
    return found.view(-1, hidden)


def _axis(group: str) -> Axis:
    return axis_of(c10d._resolve_process_group(group))  # type: ignore[arg-type, attr-defined]


_OPERANDS = "(Tensor rows, int processes, str group, str what) -> Tensor"
define(
    "gather_rows",
    _OPERANDS,
    lambda rows, processes, group, what: _gather(rows.contiguous(), _axis(group), what),
    (),
    lambda rows, processes, group, what: rows.new_empty(processes * rows.shape[0], rows.shape[1]),
)
define(
    "sum_rows",
    _OPERANDS,
    lambda rows, processes, group, what: _sum(rows.contiguous(), _axis(group), what),
    (),
    lambda rows, processes, group, what: rows.new_empty(rows.shape[0] // processes, rows.shape[1]),
)
