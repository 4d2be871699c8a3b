"""Gradients of one flat buffer: from ``param.grad`` into flat, reduced, and accumulated.

Invariant: between micro-batches no parameter holds a ``.grad``; what was computed is in ``partial`` (this rank's
unreduced sum, ``[numel]``) or in ``owned`` (reduced: ``[shard_numel]``, or ``[numel]`` where the plan replicates the
optimizer states). Sums over micro-batches are taken in ``accumulation_dtype``, which a single micro-batch never
needs: the first gradient stays in the communication dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ds_hf.engine.dist import collectives, peers
from ds_hf.engine.dist.peer_sums import PeerSums, Runs
from ds_hf.engine.dist.streams import Lane
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.comm_dtype import comm_dtype
from ds_hf.engine.zero.gradient_home import DeviceHome, GradientHome

__all__ = ["GradientBuffer", "GradientPolicy", "summed_by_copies"]

P = ParamSpec("P")
R = TypeVar("R")

# Gradients that may wait for other ranks while backward goes on. Small units cost the host more than the GPUs, and
# hosts stumble: ranks that waited for each other at every unit would add up the delays of all.
_KEPT_NBYTES = 128 << 20


@dataclass(frozen=True)
class GradientPolicy:
    """How gradients travel; one for all buffers of an engine.

    Attributes:
        whole: every rank keeps the whole reduced gradient (replicated optimizer states).
        every_micro_batch: reduce in each backward; otherwise only at the boundary.
        scale_before, scale_after: factors around the sum over ranks (mean: their product is 1 / world size).
        communication_dtype: of parameters without a ``comm_dtype`` of their own; ``None`` for the parameters' dtype.
        accumulation_dtype: dtype of sums over micro-batches.
    """

    whole: bool
    every_micro_batch: bool
    scale_before: float
    scale_after: float
    communication_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype


def summed_by_copies(buffer: FlatBuffer, policy: GradientPolicy) -> bool:
    """Whether the gradients of ``buffer`` are, where ranks reach each other's memory."""
    return not policy.whole and buffer.layout.numel * _dtype_of(buffer, policy).itemsize >= peers.LEAST_COPIED_NBYTES


def _dtype_of(buffer: FlatBuffer, policy: GradientPolicy) -> torch.dtype:
    return comm_dtype(buffer.params[0], policy.communication_dtype or buffer.dtype)


def _no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.no_grad``, which costs the host three microseconds also in backward, where gradients are off."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


class GradientBuffer:
    """Gradients of the trainable parameters of ``buffer``.

    Args:
        lane: on which they are collected and reduced; default the current stream.
        home: where reduced gradients are kept, by default on the device.
        sums: by copies between GPUs, for shards of large buffers; default by collectives.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        policy: GradientPolicy,
        lane: Lane | None = None,
        home: GradientHome | None = None,
        sums: PeerSums | None = None,
    ) -> None:
        self.buffer = buffer
        self.policy = policy
        self.lane = lane or Lane()
        self.home: GradientHome = home or DeviceHome(policy.accumulation_dtype)
        self.dtype = _dtype_of(buffer, policy)
        self._sums = sums if summed_by_copies(buffer, policy) else None
        self.hook: Callable[[Tensor], None] | None = None  # of the user, for each reduced gradient
        self.ready: set[int] = set()
        self._partial: Tensor | None = None  # the lane's memory
        self._taken: list[Tensor] = []  # of every parameter, to be reduced from where they are
        self._owned: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Every parameter has a gradient waiting."""
        return len(self.ready) == len(self.buffer.params)

    @property
    def partial(self) -> Tensor | None:
        """This rank's unreduced sum; the current stream goes on when it is there."""
        if self._taken:
            self._flatten()
        self.lane.join()
        return self._partial

    @partial.setter
    def partial(self, value: Tensor | None) -> None:
        self._partial = None
        self._taken = []
        if value is not None:
            with self.lane:
                self._partial = value.clone()
            self.lane.keep([value])

    @property
    def has_partial(self) -> bool:
        """Whether there is an unreduced sum."""
        return self._partial is not None or bool(self._taken)

    @property
    def owned(self) -> Tensor | None:
        """The reduced gradient; the current stream goes on when it is there."""
        self.lane.join()
        return self._owned

    @owned.setter
    def owned(self, value: Tensor | None) -> None:
        self._owned = value

    @property
    def has_reduced(self) -> bool:
        """Whether there is, or will be without further ado, a reduced gradient."""
        return self._owned is not None

    @property
    def empty(self) -> bool:
        return not self.has_partial and self._owned is None and not self.ready

    def pick_up(self) -> None:
        """Note the gradients that no backward told of: users put them into ``param.grad`` themselves."""
        for index, (param, slot) in enumerate(zip(self.buffer.params, self.buffer.layout.slots, strict=True)):
            if param.grad is not None and param.grad.numel() == slot.numel:
                self.ready.add(index)

    def collect(self, factor: float = 1.0, *, soon: bool = False) -> None:
        """Move the waiting ``.grad``, times ``factor``, into ``partial``; parameters without one count as zero.

        Args:
            soon: ``reduce`` comes next, as a rule.
        """
        if self.ready:
            self._collect(factor, soon)

    @_no_grad
    def _collect(self, factor: float, soon: bool) -> None:
        params = self.buffer.params
        grads, indices = [], []
        for index in sorted(self.ready):
            param = params[index]
            grad = param.grad
            if grad is None:  # cleared by the user meanwhile
                continue
            grads.append(grad.to_dense() if grad.is_sparse else grad)
            indices.append(index)
            param.grad = None
        self.ready.clear()
        if not grads:
            return
        self.lane.settle(_KEPT_NBYTES)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        if soon and self._can_take(grads):
            self._taken = grads
            return
        if self._taken:
            self._flatten()
        with self.lane:
            if self._partial is None:
                self._partial = self._together(grads, indices)
            else:
                self._partial = self._partial.to(self.policy.accumulation_dtype)
                views = self.buffer.layout.views(self._partial)
                torch._foreach_add_([views[index] for index in indices], grads)
                self.lane.keep(grads)

    def _can_take(self, grads: Sequence[Tensor]) -> bool:
        """Whether these can be left where they are until they are reduced."""
        if self._partial is not None or self._taken or len(grads) < len(self.buffer.params):
            return False
        return self._sums is None or all(grad.dtype is self.dtype and grad.is_contiguous() for grad in grads)

    @_no_grad
    def _flatten(self) -> None:
        """Copy what was taken together after all: more comes to it."""
        taken, self._taken = self._taken, []
        with self.lane:
            self._partial = self._together(taken)

    def _together(self, grads: list[Tensor], indices: Sequence[int] | None = None) -> Tensor:
        """One flat gradient of those of the parameters ``indices``, by default of all; on the lane."""
        missing = indices is not None and len(indices) < len(self.buffer.params)
        flat = self._empty(missing=missing)
        views = self.buffer.layout.views(flat)
        torch._foreach_copy_([views[index] for index in indices or ()] if missing else views, grads)
        self.lane.keep(grads[:])  # until here, not until they are reduced: that waits for other ranks
        return flat

    def _empty(self, *, missing: bool) -> Tensor:
        """A flat gradient whose gaps are zero: they enter the norm and the sums. Its memory is the lane's."""
        layout = self.buffer.layout
        if missing:
            return torch.zeros(layout.numel, dtype=self.dtype, device=self.buffer.device)
        flat = torch.empty(layout.numel, dtype=self.dtype, device=self.buffer.device)
        for start, end in layout.gaps:
            flat[start:end].zero_()
        return flat

    @_no_grad
    def reduce(self) -> None:
        """Sum ``partial`` over the ranks into ``owned``. Collective: takes part with zeros when there is nothing."""
        if not self.has_partial:
            if self.buffer.axis.world_size == 1:
                return
            with self.lane:
                self._partial = self._empty(missing=True)
        if not self.buffer.sharded:
            self.buffer.gather()  # an update that nobody waited for may still read the last gradient where it is kept
        taken, self._taken = self._taken, []
        with self.lane:
            if self._sums is None:
                self._owned = self._by_collective(taken)
            else:
                self._owned = self._by_copies(self._sums, taken)
                self.lane.keep(taken)

    def _unreduced(self) -> Tensor:
        assert self._partial is not None
        flat, self._partial = self._partial.to(self.dtype), None
        return flat

    def _by_collective(self, taken: list[Tensor]) -> Tensor:
        policy = self.policy
        if taken:
            self._partial = self._together(taken)
            taken.clear()  # before more memory is taken
        reads_at_once = self._owned is not None or self.hook is not None or not self.home.adds_in_place
        if reads_at_once:
            self.lane.arrive()
        reduced = collectives.reduce_gradient(
            self._unreduced(),
            self.buffer.axis,
            scatter=not policy.whole,
            scale_before=policy.scale_before,
            scale_after=policy.scale_after,
            what=self.buffer.gradients_label,
            lane=None if reads_at_once else self.lane,
        )
        return self._add(reduced)

    def _by_copies(self, sums: PeerSums, taken: list[Tensor]) -> Tensor:
        runs = self._slots if taken else self._stretches
        if not taken:
            flat = self._unreduced()
            taken = [flat[start:end] for start, end in runs]
        policy, before = self.policy, self._owned
        adds = before is not None and self.home.adds_in_place and self.hook is None
        reduced = sums.reduce_scatter(
            taken,
            runs,
            self.buffer.layout.numel,
            factor=policy.scale_before * policy.scale_after,
            what=self.buffer.gradients_label,
            before=before if adds else None,
            dtype=policy.accumulation_dtype if adds else None,
        )
        return reduced if adds else self._add(reduced)

    def _add(self, reduced: Tensor) -> Tensor:
        """``owned`` with one more."""
        if self.hook is not None:
            self.hook(reduced)
        return self.home.add(self._owned, reduced)

    @cached_property
    def _slots(self) -> Runs:
        return tuple((slot.offset, slot.end) for slot in self.buffer.layout.slots)

    @cached_property
    def _stretches(self) -> Runs:
        """What lies between the gaps."""
        gaps = self.buffer.layout.gaps
        starts, ends = zip(*gaps, strict=True) if gaps else ((), ())
        pairs = zip((0, *ends), (*starts, self.buffer.layout.numel), strict=True)
        return tuple((start, end) for start, end in pairs if start < end)

    @property
    def squares(self) -> Tensor | None:
        """Squared norm of ``owned``, where its home has taken it; the current stream goes on when it is there."""
        if self._owned is None:
            return None
        self.lane.join()
        return self.home.squares

    def settled(self) -> Tensor | None:
        """``owned``, once it may be read."""
        self.home.settle()
        return self.owned

    def replace(self, value: Tensor) -> None:
        """Let ``value`` be the reduced gradient."""
        assert self._owned is not None
        place = self._owned.device
        self.home.clear()
        self._owned = value.to(place)

    def clear(self) -> None:
        """Drop everything accumulated."""
        for index in self.ready:
            self.buffer.params[index].grad = None
        self.ready.clear()
        self._partial = self._owned = None
        self._taken = []
        self.home.clear()

    def free(self) -> None:
        """Nothing will be reduced any more."""
        self._sums = None

    @property
    def nbytes(self) -> int:
        """Bytes of accumulated gradients held now."""
        return sum(t.untyped_storage().nbytes() for t in (self._partial, self._owned, *self._taken) if t is not None)
