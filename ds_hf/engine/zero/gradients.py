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
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives, peers
from ds_hf.engine.comm.block_collectives import BlockSums
from ds_hf.engine.comm.peer_sums import PeerSums
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.comm_dtype import COMM_DTYPE
from ds_hf.engine.zero.storage import DeviceGradientStorage, GradientStorage, summed_in
from ds_hf.errors import DsHfError

__all__ = ["GradientBuffer", "GradientPolicy", "summed_by_copies"]

P = ParamSpec("P")
R = TypeVar("R")
Hook = Callable[[Tensor], None]

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
    found: torch.dtype = getattr(buffer.params[0], COMM_DTYPE, policy.communication_dtype or buffer.dtype)
    return found


def _no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.no_grad``, which costs the host three microseconds also in backward, where gradients are off."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


class _Into(NamedTuple):
    """What a new sum is added to: ``before`` in ``storage``; the user's ``hook`` is told of the new one alone."""

    before: Tensor | None
    storage: GradientStorage
    hook: Hook | None

    def add(self, reduced: Tensor) -> Tensor:
        """Both together."""
        if self.hook is not None:
            self.hook(reduced)
        return self.storage.add(self.before, reduced)


class _Sum:
    """The sum over ranks of the gradients of one buffer: by a collective, in blocks, or by copies between GPUs.

    Attributes:
        copies: what makes them, ``None`` for collectives.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        policy: GradientPolicy,
        comm_stream: CommStream,
        copies: PeerSums | None,
        blocks: BlockSums | None,
        reduces: Callable[[], bool] | None,
    ) -> None:
        self._blocks, self._reduces = blocks, reduces
        self.copies = copies if summed_by_copies(buffer, policy) else None
        self._buffer, self._policy, self._comm_stream = buffer, policy, comm_stream
        self._others = buffer.replicas.others(buffer.axis)

    @property
    def is_made(self) -> bool:
        """Not, where each rank keeps its own gradients."""
        return self._reduces is None or self._reduces()

    def by_collective(self, unreduced: Callable[[], Tensor], into: _Into, *, nothing: bool) -> Tensor:
        """The sum of what ``unreduced`` gives, ``[numel]``, added to what was summed before; collective. See
        ``GradientBuffer.reduce``."""
        policy = self._policy
        if not self.is_made:
            own = policy.scale_before * policy.scale_after * self._buffer.axis.world_size
            return into.add(unreduced() if own == 1 else unreduced().mul_(own))
        reads_at_once = into.before is not None or into.hook is not None or not into.storage.adds_in_place
        if reads_at_once:
            self._comm_stream.arrive()
        what = self._buffer.labels.gradients
        if self._blocks is not None:
            factor = policy.scale_before * policy.scale_after
            return into.add(self._blocks.reduce_scatter(unreduced(), factor=factor, what=what, nothing=nothing))
        reduced = collectives.reduce_gradient(
            unreduced(),
            self._buffer.axis,
            scatter=not policy.whole,
            scale_before=policy.scale_before,
            scale_after=policy.scale_after,
            what=what,
            comm_stream=None if reads_at_once else self._comm_stream,
            others=self._others,
        )
        return into.add(reduced)

    def by_copies(self, copies: PeerSums, taken: list[Tensor], flat: Tensor | None, into: _Into) -> Tensor:
        """The sum of the gradients ``taken`` from the parameters, or of ``flat``, as ``by_collective``."""
        layout, policy = self._buffer.layout, self._policy
        runs = layout.runs if flat is None else layout.stretches
        if flat is not None:
            taken = [flat[start:end] for start, end in runs]
        adds = into.before is not None and into.storage.adds_in_place and into.hook is None
        reduced = copies.reduce_scatter(
            taken,
            runs,
            layout.numel,
            factor=policy.scale_before * policy.scale_after,
            what=self._buffer.labels.gradients,
            before=into.before if adds else None,
            dtype=policy.accumulation_dtype if adds else None,
        )
        return reduced if adds else into.add(reduced)


class GradientBuffer:
    """Gradients of the trainable parameters of ``buffer``.

    Args:
        comm_stream: on which they are collected and reduced; default the current stream.
        storage: where reduced gradients are kept, by default on the device.
        sums: by copies between GPUs, for shards of large buffers; default by collectives.
        blocks: sums in blocks, for gradients of which each rank keeps a shard.
        reduces: says whether gradients are summed at all; else each rank keeps its own, for an optimizer that sends
            something else. Default always.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        policy: GradientPolicy,
        comm_stream: CommStream | None = None,
        storage: GradientStorage | None = None,
        sums: PeerSums | None = None,
        blocks: BlockSums | None = None,
        reduces: Callable[[], bool] | None = None,
    ) -> None:
        self.buffer = buffer
        self.policy = policy
        self.comm_stream = comm_stream or CommStream()
        self.storage: GradientStorage = storage or DeviceGradientStorage(policy.accumulation_dtype)
        self.dtype = _dtype_of(buffer, policy)
        self.alone = buffer.replicas.axis.world_size == 1  # nothing is summed over processes
        self.owners = buffer.replicas.owners(whole=policy.whole, shards=buffer.axis)  # of each element, in the world
        self._sum = _Sum(buffer, policy, self.comm_stream, sums, blocks, reduces)
        self.feedback = blocks if blocks is not None and blocks.has_feedback else None  # of sums in blocks
        self.hook: Hook | None = None  # of the user, for each reduced gradient
        self.marks = False  # that all ranks hold the same hangs on who has nothing being right
        self.lent = False  # backward writes gradients to memory that the next one overwrites
        self.ready: set[int] = set()
        self.idle: set[int] = set()  # parameters that are frozen in the present call of the model ...
        self.unasked: set[int] = set()  # ... and those that were in all calls since the last step
        self._partial: Tensor | None = None  # the stream's memory
        self._taken: list[Tensor] = []  # of every parameter, to be reduced from where they are
        self._owned: Tensor | None = None
        self._received: set[int] = set()  # which parameters have gradients from backward
        self._views: tuple[Tensor, list[Tensor]] | None = None  # of the parameters in that flat gradient
        self._shown: list[Tensor] | None = None  # those that are in ``.grad``

    @property
    def complete(self) -> bool:
        """Every parameter that is not frozen has a gradient waiting."""
        return len(self.ready) >= len(self.buffer.params) - len(self.idle)

    @property
    def sleeps(self) -> bool:
        """All parameters are frozen in this step: nothing is summed or updated."""
        return len(self.unasked) == len(self.buffer.params)

    @property
    def without(self) -> list[int]:
        """Parameters that train and have had no gradient here since all were cleared."""
        count = len(self.buffer.params)
        if len(self._received) + len(self.unasked) >= count:
            return []
        return [index for index in range(count) if index not in self._received and index not in self.unasked]

    @property
    def silent(self) -> bool:
        """All parameters are frozen now: the present backward gives nothing."""
        return len(self.idle) == len(self.buffer.params)

    def ask(self, idle: set[int], *, first: bool) -> None:
        """Of the coming call the parameters ``idle`` are frozen.

        Args:
            first: it is the first one since the last step.
        """
        self.idle.clear()  # hooks hold the set
        self.idle |= idle
        self.unasked = set(idle) if first else self.unasked & idle

    @property
    def partial(self) -> Tensor | None:
        """This rank's unreduced sum, ``[numel]`` in ``dtype``; the current stream goes on when it is there."""
        if self._taken:
            self._flatten()
        self.comm_stream.join()
        return self._partial

    @partial.setter
    def partial(self, value: Tensor | None) -> None:
        self._partial = self._views = None
        self._taken = []
        if value is not None:
            with self.comm_stream:
                self._partial = value.clone()
            self.comm_stream.keep([value])

    @property
    def has_partial(self) -> bool:
        """Whether there is an unreduced sum."""
        return self._partial is not None or bool(self._taken)

    @property
    def owned(self) -> Tensor | None:
        """The reduced gradient, flat, in the dtype of sums; the current stream goes on when it is there."""
        self.comm_stream.join()
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
    def untouched(self) -> bool:
        """No parameter has been given a gradient since the last step."""
        return self.empty and all(param.grad is None for param in self.buffer.params)

    @property
    def came_from_nobody(self) -> bool:
        """The sum is of processes that all had ``nothing``."""
        owned = self.settled()
        return owned is None or bool((owned.signbit() & (owned == 0)).all())

    @property
    def tells(self) -> bool:
        """Whether that can be known: not where each rank keeps its own, and of sums by copies between GPUs."""
        return not self.alone and self._sum.is_made and self._sum.copies is None

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
        self.comm_stream.join()
        self._shown = self._views_of(flat)
        for index, (param, view) in enumerate(zip(self.buffer.params, self._shown, strict=True)):
            if index not in self.unasked:
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
        if self.alone and len(changed) == len(self.buffer.params) and all(grad is None for _, grad in changed):
            self._partial = self._owned = self._views = None  # nothing, on the only rank
        elif changed:
            _overwrite(changed)

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
                    name = self.buffer.labels.name
                    raise DsHfError(
                        f"a parameter of shape {tuple(slot.shape)} in {name} was given a .grad after "
                        "backward, but its gradient is kept elsewhere by then (sharded, or in another dtype), and the "
                        "two would be added up. To replace it, call deepspeed.utils.safe_set_full_grad(param, value) "
                        "between backward() and step()"
                    )
                self.ready.add(index)
                self.unasked.discard(index)  # frozen or not: as in torch, a gradient is what counts

    def collect(self, factor: float = 1.0, *, soon: bool = False) -> None:
        """Move the waiting ``.grad``, times ``factor``, into ``partial``; parameters without one count as zero.

        Args:
            soon: ``reduce`` comes next, as a rule.

        Raises:
            DsHfError: a backward that the engine did not see gave gradients that are complete already.
        """
        if self.ready and self._shown is not None:  # a backward that nothing announced added to what is shown
            if factor != 1.0 or (self._owned is not None and not self.alone):
                raise _unseen(self.buffer.labels.name)
            self.ready.clear()
            self.take_back()
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
        if len(self._received) < len(params):
            self._received.update(indices)
        self.comm_stream.settle(_KEPT_NBYTES)
        if self.lent:
            grads = list(torch._foreach_mul(grads, factor))
        elif factor != 1.0:
            torch._foreach_mul_(grads, factor)
        if soon and self._partial is None and not self._taken and self._may_stay(grads):
            self._taken = grads
            return
        if self._taken:
            self._flatten()
        with self.comm_stream:
            if self._partial is None:
                self._partial = self._together(grads, indices)
            else:
                self._partial = self._partial.to(summed_in(self.policy.accumulation_dtype, self._partial.dtype))
                views = self._views_of(self._partial)
                torch._foreach_add_([views[index] for index in indices], grads)
                self.comm_stream.keep(grads)

    def _may_stay(self, grads: Sequence[Tensor]) -> bool:
        """Whether all of these can be left where they are until they are reduced."""
        if len(grads) < len(self.buffer.params):
            return False
        return self._sum.copies is None or all(grad.dtype is self.dtype and grad.is_contiguous() for grad in grads)

    @_no_grad
    def _flatten(self) -> None:
        """Copy what was taken together after all: more comes to it."""
        taken, self._taken = self._taken, []
        with self.comm_stream:
            self._partial = self._together(taken)

    def _together(self, grads: list[Tensor], indices: Sequence[int] | None = None) -> Tensor:
        """One flat gradient of those of the parameters ``indices``, by default of all; on the stream."""
        missing = indices is not None and len(indices) < len(self.buffer.params)
        flat = self.buffer.layout.empty(self.dtype, self.buffer.device, missing=missing)
        views = self._views_of(flat)
        torch._foreach_copy_([views[index] for index in indices or ()] if missing else views, grads)
        self.comm_stream.keep(grads[:])  # until here, not until they are reduced: that waits for other ranks
        return flat

    @_no_grad
    def reduce(self, *, last: bool = False, nothing: bool = False) -> None:
        """Sum ``partial`` over the ranks into ``owned``. Collective: takes part with zeros when there is nothing, which
        a rank that is alone does when it is the ``last`` chance before the step.

        Args:
            nothing: of no buffer there is anything here. The zeros are negative then, and so is their sum where that
                is so on all ranks, for -0 + 0 is 0: who has nothing learns whether anyone has, and no one is asked.
        """
        if not self.has_partial:
            if self.alone and not last:
                return
            with self.comm_stream:
                self._partial = self.buffer.layout.empty(self.dtype, self.buffer.device, missing=True)
                if nothing:
                    self._partial.neg_()
        if not self.buffer.sharded:
            self.buffer.gather()  # an update that was not waited for may still read the last gradient where it is
        taken, self._taken = self._taken, []
        into = _Into(self._owned, self.storage, self.hook)
        with self.comm_stream:
            if self._sum.copies is None:
                if taken:
                    self._partial = self._together(taken)
                    taken.clear()  # before more memory is taken
                if self.marks and not nothing and self._partial is not None:
                    # Of each rank -0.0 becomes 0.0: there is something, whatever the gradient.
                    self._partial[:: self.buffer.layout.shard_numel].add_(0.0)
                self._owned = self._sum.by_collective(self._unreduced, into, nothing=nothing)
            else:
                flat = None if taken else self._unreduced()
                self._owned = self._sum.by_copies(self._sum.copies, taken, flat, into)
                self.comm_stream.keep(taken)

    def _unreduced(self) -> Tensor:
        assert self._partial is not None
        if self._partial.dtype is not self.dtype:
            self._views = None
        flat, self._partial = self._partial.to(self.dtype), None
        return flat

    @property
    def squares(self) -> Tensor | None:
        """Squared norm of ``owned``, 0-dim fp32, where its storage has taken it; the current stream goes on when it is
        there."""
        if self._owned is None:
            return None
        self.comm_stream.join()
        return self.storage.squares

    def settled(self) -> Tensor | None:
        """``owned``, flat and in the dtype of sums, once it may be read."""
        self.storage.settle()
        return self.owned

    def replace(self, value: Tensor) -> None:
        """Let ``value``, flat and in any dtype, be the reduced gradient."""
        assert self._owned is not None
        place = self._owned.device
        self.storage.clear()
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
        self.unasked = set(self.idle)
        self._partial = self._owned = None
        self._taken = []
        self.storage.clear()

    def free(self) -> None:
        """Nothing will be reduced any more; host memory for gradients goes, too."""
        self._sum.copies = None
        self.storage = DeviceGradientStorage(torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of accumulated gradients held now."""
        return sum(t.untyped_storage().nbytes() for t in (self._partial, self._owned, *self._taken) if t is not None)


@_no_grad
def _overwrite(changed: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Give what was shown other values; ``None`` is zero."""
    for view, grad in changed:
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad.to_dense() if grad.is_sparse else grad)


def _unseen(name: str) -> DsHfError:
    return DsHfError(
        f"a backward that the engine did not see reached parameters of {name}, whose gradients are complete: call "
        "engine.backward(loss), or compute the loss from what the model's forward returns"
    )
