"""Gradients of one flat buffer: from ``param.grad`` into flat, reduced, and accumulated.

Invariant: between micro-batches what was computed is in ``partial`` (this rank's unreduced sum, ``[numel]``) or in
``owned`` (reduced: ``[shard_numel]``, or ``[numel]`` where the plan replicates the optimizer states). No parameter
holds a ``.grad``, unless that is *shown*: a view of those, from the end of a backward to the next or the step. Sums
over micro-batches are taken in ``accumulation_dtype``, which a single micro-batch never needs: the first gradient
stays in the communication dtype.
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
from ds_hf.errors import DsHfError

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
        self._received: set[int] = set()  # which parameters have gradients from backward
        self._views: tuple[Tensor, list[Tensor]] | None = None  # of the parameters in that flat gradient
        self._shown: list[Tensor] | None = None  # those that are in ``.grad``

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
        self._partial = self._views = None
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

    @property
    def shown(self) -> bool:
        """``.grad`` of the parameters is what has been computed."""
        return self._shown is not None

    def show(self) -> None:
        """Let ``.grad`` of the parameters be what has been computed, until ``take_back``: to be read, changed in place
        or replaced. Views, where the whole of it lies here in the parameters' dtype; otherwise nothing is shown."""
        flat = self._owned if self._partial is None else self._partial
        twofold = self._partial is not None and self._owned is not None
        if not self.policy.whole or flat is None or twofold or self._taken or flat.dtype is not self.buffer.dtype:
            self._views = None
            return
        self.lane.join()
        self._shown = self._views_of(flat)
        for param, view in zip(self.buffer.params, self._shown, strict=True):
            param.grad = view

    def take_back(self) -> None:
        """No parameter has a ``.grad`` any more; what users made of those that were shown counts."""
        shown, self._shown = self._shown, None
        changed: list[tuple[Tensor, Tensor | None]] = []
        for param, view in zip(self.buffer.params, shown or (), strict=shown is not None):
            grad = param.grad
            param.grad = None
            if grad is not view:
                changed.append((view, grad))
        if changed:
            self._change(changed)

    @_no_grad
    def _change(self, changed: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Give what was shown other values; ``None`` is zero, and where it is all of them on the only rank, nothing."""
        every = len(changed) == len(self.buffer.params) and all(grad is None for _, grad in changed)
        if every and self.buffer.axis.world_size == 1:
            self._partial = self._owned = self._views = None
            return
        for view, grad in changed:
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """The parameters in ``flat``. Kept where it stays: shards must not keep the whole."""
        if self._views is not None and self._views[0] is flat:
            return self._views[1]
        views = self.buffer.layout.views(flat)
        if self.policy.whole:
            self._views = flat, views
        return views

    def pick_up(self) -> None:
        """Note the gradients that no backward told of: users put them into ``param.grad`` themselves.

        Raises:
            DsHfError: a backward gave the parameter a gradient already.
        """
        for index, (param, slot) in enumerate(zip(self.buffer.params, self.buffer.layout.slots, strict=True)):
            if param.grad is not None and param.grad.numel() == slot.numel:
                if index in self._received:
                    raise DsHfError(
                        f"a parameter of shape {tuple(slot.shape)} in {self.buffer.label} was given a .grad after "
                        "backward, but its gradient is kept elsewhere by then (sharded, or in another dtype), and the "
                        "two would be added up. To replace it, call deepspeed.utils.safe_set_full_grad(param, value) "
                        "between backward() and step()"
                    )
                self.ready.add(index)

    def collect(self, factor: float = 1.0, *, soon: bool = False) -> None:
        """Move the waiting ``.grad``, times ``factor``, into ``partial``; parameters without one count as zero.

        Args:
            soon: ``reduce`` comes next, as a rule.
        """
        if self.ready and self._shown is not None:
            self._take_in(factor)
        if self.ready:
            self._collect(factor, soon)

    def _take_in(self, factor: float) -> None:
        """A backward that nothing announced added to what is shown.

        Raises:
            DsHfError: it should not have.
        """
        if factor != 1.0 or (self._owned is not None and self.buffer.axis.world_size > 1):
            raise DsHfError(
                f"a backward that the engine did not see reached parameters of {self.buffer.label}, whose gradients "
                "are complete: call engine.backward(loss), or compute the loss from what the model's forward returns"
            )
        self.ready.clear()
        self.take_back()

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
        if len(self._received) < len(params):
            self._received.update(indices)
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
                views = self._views_of(self._partial)
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
        views = self._views_of(flat)
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
        if self._partial.dtype is not self.dtype:
            self._views = None
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
        self._views = None

    def clear(self) -> None:
        """Drop everything accumulated."""
        for param in self.buffer.params if self._shown is not None else ():
            param.grad = None
        self._shown = self._views = None
        self._received.clear()
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
