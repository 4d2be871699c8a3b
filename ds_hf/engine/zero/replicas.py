"""Replicas: the processes that hold the same values of a parameter.

ZeRO divides a parameter's states over its replicas; its gradient is summed over them and divided by the number of
processes whose losses are averaged. Then every element of every sharded state has one owner among the replicas, and the
gradient norm of the model is the sum of what every process of the world owns, each counted once.

=============================================  =========================  ===============  ===================
parameter                                      axis                       divisor          copies
=============================================  =========================  ===============  ===================
ordinary, or cut over tensor                   data x sequence            its size         1
whole, where the engine cuts others            data x sequence x tensor   its size         1
the same, with a part of its gradient          data x sequence x tensor   data x sequence  1
whole, where an ``mpu`` made the groups        its data group             its size         model-parallel size
of a module tied over stages of a pipeline     these stages x the above   of the above     as above
experts, where the engine divides them         those with the same ones   data x sequence  1
=============================================  =========================  ===============  ===================

With ``ds_hf.sequence_gradients: "sum"`` divisors are smaller by the number of processes that share a sequence.

Nothing is averaged over a model-parallel group of an ``mpu``: there each of its processes owns the parameter and makes
the same update. The last row sums gradients over stages: each stage has a part of the gradient.

The experts' divisor is not the size of their axis: what reaches a process has come from all that divide the layer.

Hierarchical ZeRO divides some states over an inner part of the axis. Then so many processes own the same shard as there
are such parts; its gradient is summed over them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_hf.config.plan import Over
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.zero.cut import is_cut

__all__ = [
    "Replicas",
    "divide_over_experts",
    "expert_processes",
    "is_summed_over_tensor",
    "is_tied_over_stages",
    "replicas_of",
    "sum_over_tensor",
    "tie_over_stages",
]

_STAGES = "_ds_stages"  # of a parameter that several stages of a pipeline hold: what it is called, and the stages


@dataclass(frozen=True)
class Replicas:
    """Of the parameters of one flat buffer.

    Attributes:
        axis: the processes over which states are divided and gradients summed.
        divisor: processes whose losses are averaged: gradients are divided by it.
        copies: in how many such axes of the world the same values are.
        inner: part of ``axis`` over which hierarchical ZeRO divides some states, ``None`` for all of it ...
        outer: ... and the processes with the same place in the other parts.
        tied: what the parameter is called on all stages of a pipeline that hold it, ``""`` where one holds it. Its
            gradient is reduced after all backwards of a batch: before that the other stages may still need what this
            one has to send them.
    """

    axis: Axis
    divisor: int
    copies: int = 1
    inner: Axis | None = None
    outer: Axis | None = None
    tied: str = ""

    @classmethod
    def along(cls, axis: Axis) -> Replicas:
        """Of ordinary parameters, where ``axis`` is all processes that hold them."""
        return cls(axis, axis.world_size)

    def over(self, which: Over) -> Axis:
        """The processes over which a state is divided that is divided so."""
        return self.inner if which == "inner" and self.inner is not None else self.axis

    def others(self, shards: Axis) -> Axis | None:
        """The processes that own the same shard as this one, where states are divided over ``shards``; ``None`` where
        it is this one alone."""
        return self.outer if self.inner is not None and shards == self.inner else None

    def owners(self, *, whole: bool, shards: Axis | None = None) -> int:
        """How many processes of the world own each element of a state; ``whole``: of one that is not divided.

        Args:
            shards: over which it is divided, default all of ``axis``.
        """
        parts = 1 if whole else (shards or self.axis).world_size
        return self.copies * (self.axis.world_size // parts)


def replicas_of(param: Tensor, mesh: Mesh) -> Replicas:
    """The row of the table for ``param``. The first call for a new kind is collective: all ranks make it."""
    data, parts = mesh.replicas, (mesh.inner, mesh.outer)
    name, stages = getattr(param, _STAGES, ("", ()))
    tied = len(stages) > 1
    summed = mesh.shape.sequence if mesh.sums_sequence else 1
    if (over := expert_processes(param)) > 1:
        return Replicas(mesh.experts_over(over)[1], data.world_size // summed)
    if is_cut(param) or mesh.shape.tensor == 1 or mesh.is_given:
        copies = 1 if is_cut(param) or not mesh.is_given else mesh.shape.tensor
        axis = mesh.spanning(stages, "data", "sequence") if tied else data
        assert axis is not None
        inner, outer = (None, None) if tied else parts
        return Replicas(axis, data.world_size // summed, copies, inner, outer, name)
    everyone = mesh.axis("data", "sequence", "tensor")
    averaged = data.world_size if is_summed_over_tensor(param) else everyone.world_size
    axis = mesh.spanning(stages, "data", "sequence", "tensor") if tied else everyone
    assert axis is not None
    return Replicas(axis, averaged // summed, tied=name)


def sum_over_tensor(param: Tensor, *, parts: bool | None = True) -> None:
    """Mark a whole parameter of which each tensor-parallel process computes a part of the gradient; or all of it, or
    unknown (``None``)."""
    setattr(param, _SUMMED, parts)


def is_summed_over_tensor(param: Tensor) -> bool | None:
    """Whether each tensor-parallel process computes a part of its gradient; ``None`` where no plan says it."""
    found: bool | None = getattr(param, _SUMMED, None)
    return found


_SUMMED = "_ds_summed_over_tensor"


def divide_over_experts(param: Tensor, size: int) -> None:
    """Mark a parameter of experts, of which ``size`` processes have some each: a part of its first dimension, or others
    of the same name in its place."""
    setattr(param, _EXPERTS, size)


def expert_processes(param: Tensor) -> int:
    """Over how many processes the experts are divided that the parameter belongs to; 1 for all others."""
    return int(getattr(param, _EXPERTS, 1))


_EXPERTS = "_ds_experts_over"


def tie_over_stages(param: Tensor, name: str, stages: Sequence[int]) -> None:
    """The parameter is in a module that all of ``stages`` hold, where it is called ``name``."""
    setattr(param, _STAGES, (name, tuple(stages)))


def is_tied_over_stages(param: Tensor) -> bool:
    """Whether several stages of a pipeline hold the parameter."""
    return len(getattr(param, _STAGES, ("", ()))[1]) > 1
