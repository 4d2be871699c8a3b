"""How the inner optimizer updates the masters, and how the parameters get the new values.

Three ways, from the best to the one that always works: unit after unit in one pass (rules that treat elements
independently), all units at once with what each rank holds of every parameter (rules that look at whole tensors), and
``optimizer.step()`` itself over gradients in ``param.grad`` (every other optimizer, and where ``step`` has hooks).

Then sharded parameters are gathered when they are needed, and replicated ones after the step, beside what comes next: a
deferred all-gather, until which they are *pending* (``zero/pending.py``). Small buffers share a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import Awaited, CommStream
from ds_hf.engine.optim.base import Piece, TensorwiseOptimizer, UnitPieces
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.optim.store import FrozenGroup, StateStore
from ds_hf.engine.optim.streaming import UnitUpdate
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gathering import Gathering
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.layout import Labels
from ds_hf.errors import DsHfError

__all__ = ["OptimizerPolicy", "Stepping", "UnitsJob", "sync_weights"]

_OF_CONSTRUCTORS = ("amsgrad", "maximize", "differentiable")  # of which updates of units know nothing


@dataclass(frozen=True)
class OptimizerPolicy:
    """What the plan and the configuration say of the step.

    Attributes:
        whole: optimizer states are replicated.
        device: where masters and moments live.
        max_norm: ``gradient_clipping``; 0 for none.
        check_overflow: skip the step when a gradient is not finite.
        elementwise: the rule treats elements independently, so segments may span parameters.
        moments: dtype of moments of 16-bit masters.
        stochastic: how those are rounded, see ``StreamingOptimizer.stochastic_rounding``.
        alike: processes that read different samples hold the same parameters: experts are not divided over them.
        cut_over: of a model with cut parameters all processes, over which rules that look at whole ones take norms.
    """

    whole: bool
    device: torch.device
    max_norm: float
    check_overflow: bool
    elementwise: bool
    moments: torch.dtype = torch.float32
    stochastic: bool = False
    alike: bool = True
    cut_over: Axis | None = None


class Stepping:
    """One update of everything; called with ``scale_and_skip``, as the operators take it.

    Args:
        inner: the optimizer, whose ``params`` are segments.
        update: its update of single units, if it has one.
        segments: by gradient buffer, in the order of the updates.
        groups: for each gradient buffer, the parameter group of each of its parameters.
        masters: over what this rank owns.
        axis_device: where processes meet.
        store: where states are, and where units are updated.
    """

    def __init__(
        self,
        inner: Optimizer,
        update: UnitUpdate | None,
        segments: Mapping[GradientBuffer, Sequence[Segment]],
        groups: dict[GradientBuffer, list[int]],
        masters: Mapping[FlatBuffer, Tensor],
        policy: OptimizerPolicy,
        axis_device: torch.device,
        store: StateStore,
    ) -> None:
        self.store = store
        self._stepping = self._failed = False
        self.inner = inner
        self.update = update
        self.segments = segments
        self.groups = groups
        self.masters = masters
        self.policy = policy
        self.axis_device = axis_device

    @property
    def unfinished(self) -> bool:
        """An update ended in an exception: some units are a step ahead of others."""
        return self._stepping or self._failed

    def forget_failure(self) -> None:
        """Everything is going to be replaced."""
        self._stepping = self._failed = False

    def _note_failure(self) -> None:
        self._failed = True

    def __call__(self, scale_and_skip: Tensor | None) -> None:
        """Update, and sync the weights, unit after unit where the rule can.

        Raises:
            DsHfError: ``step`` of the optimizer was hooked, and not all states can be in memory.
        """
        if isinstance(self.inner, TensorwiseOptimizer):
            for hook in self.inner._optimizer_step_pre_hooks.values():
                hook(self.inner, (), {})
            self._pieces(self.inner, scale_and_skip)
            for after in self.inner._optimizer_step_post_hooks.values():
                after(self.inner, (), {})
        elif self.update is None or self.observed:
            if self.store.splits:
                raise DsHfError(
                    f"step() of {type(self.inner).__name__} has hooks, but {self.store.splits}: remove them"
                )
            self._whole(scale_and_skip)
        else:
            self._units(self.update, scale_and_skip)

    @property
    def by_unit(self) -> bool:
        """Whether units are updated one by one, or ``step()`` of the optimizer is called."""
        return self.update is not None and not self.observed

    @property
    def observed(self) -> bool:
        """``step`` has hooks."""
        return bool(self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks)

    def _units(self, update: UnitUpdate, scale_and_skip: Tensor | None) -> None:
        for group in self.inner.param_groups:
            if set_later := [flag for flag in _OF_CONSTRUCTORS if group.get(flag)]:
                raise DsHfError(
                    f"{set_later[0]} was set in a parameter group of {type(self.inner).__name__} after initialize(), "
                    "and the update that was chosen there does not know it: give it to the optimizer's constructor"
                )
        groups = [FrozenGroup(group) for group in self.inner.param_groups]
        make = partial(self._job, update, groups, _ScaleAndSkip(scale_and_skip, self.store.device))
        self._stepping = True
        for done in self.store.stream([g for g in self.segments if not g.sleeps], make):
            sync_weights([gradient.buffer for gradient in done], whole=self.policy.whole)
        self._stepping = False
        self.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it

    def _job(
        self,
        update: UnitUpdate,
        groups: Sequence[FrozenGroup],
        scale_and_skip: _ScaleAndSkip,
        batch: Sequence[GradientBuffer],
    ) -> UnitsJob:
        units = [(self.segments[g], g.settled()) for g in batch]
        job = UnitsJob(update, groups, scale_and_skip, units, self._note_failure)
        for gradient in batch:
            gradient.clear()
        return job

    def _pieces(self, optimizer: TensorwiseOptimizer, scale_and_skip: Tensor | None) -> None:
        copies_of: dict[GradientBuffer, Tensor | None] = {}
        # The pieces are not kept: as long as one shares a parameter's memory, its gather is waited for.
        optimizer.update_pieces(self._unit_pieces(copies_of), _on(scale_and_skip, self.policy.device))
        for gradient in copies_of:
            gradient.clear()
        self.write_weights({gradient.buffer: copies for gradient, copies in copies_of.items()})
        optimizer._opt_called = True

    def _unit_pieces(self, copies_of: dict[GradientBuffer, Tensor | None]) -> list[UnitPieces]:
        """What this rank has of each unit; notes in ``copies_of`` where parameters are written beside the masters."""
        units = []
        for gradient, segments in self.segments.items():
            if gradient.sleeps:
                continue
            grads, copies = self._owned_gradient(gradient), self._copies(gradient.buffer)
            copies_of[gradient] = copies if grads is not None else None
            layout, axis = gradient.buffer.layout, gradient.buffer.axis
            given, cut = self.groups[gradient], self.policy.cut_over
            alone = self.policy.whole or axis.world_size == 1
            owners = gradient.buffer.replicas.owners(whole=self.policy.whole, shards=axis) if cut is not None else 1
            if copies is not None and not all(s.active for s in segments):  # what is not updated stays what it is
                copies.copy_(self.masters[gradient.buffer])
            pieces = [
                _piece(s, self.inner.param_groups[s.group], grads, copies)
                for s in segments
                if s.active and grads is not None
            ]
            units.append(
                UnitPieces(
                    pieces,
                    len(layout.slots),
                    layout,
                    [self.inner.param_groups[index] for index in given],
                    gradient.dtype,
                    cut if cut is not None else None if alone else axis,
                    self.masters[gradient.buffer].device,
                    self.axis_device,
                    owners,
                )
            )
        return units

    def _whole(self, scale_and_skip: Tensor | None) -> None:
        """``optimizer.step()`` itself, over gradients in ``param.grad``."""
        for gradient, segments in self.segments.items():
            grads = self._owned_gradient(gradient)
            if grads is not None:
                grads = grads.to(self.masters[gradient.buffer].dtype)
                if scale_and_skip is not None:
                    grads.mul_(scale_and_skip[0].to(grads.device))
            for s in segments:
                s.param.grad = None if grads is None or not s.active else grads[s.start : s.end].view(s.shape)
        self.inner.step()
        for segments in self.segments.values():
            for s in segments:
                s.param.grad = None
        self.write_weights({gradient.buffer: None for gradient in self.segments if not gradient.sleeps})

    def _owned_gradient(self, gradient: GradientBuffer) -> Tensor | None:
        """The reduced gradient beside its master, as it was reduced."""
        owned = gradient.settled()
        return None if owned is None else owned.to(self.masters[gradient.buffer].device)

    def _copies(self, buffer: FlatBuffer) -> Tensor | None:
        """Where the kernel writes the parameters next to the masters; None where the masters are the parameters."""
        owned, master = buffer.owned(whole=self.policy.whole), self.masters[buffer]
        if owned.data_ptr() == master.data_ptr():
            return None
        if owned.device == master.device and buffer.stays:
            return owned
        pin = master.is_pinned()
        return torch.empty(owned.shape, dtype=owned.dtype, device=master.device, pin_memory=pin)

    def write_weights(self, written: Mapping[FlatBuffer, Tensor | None]) -> None:
        """Give the parameters the masters' values, from copies where they were written already."""
        for buffer, copies in written.items():
            owned = buffer.owned(whole=self.policy.whole)
            source = self.masters[buffer] if copies is None else copies
            if owned.data_ptr() != source.data_ptr():
                owned.copy_(source)
        sync_weights(list(written), whole=self.policy.whole)


class _ScaleAndSkip:
    """The factor and the flag that kernels read, on whatever device they run.

    Args:
        device: where they will be read, if not where they are: they go there ahead of what is copied from here on.
    """

    def __init__(self, scale_and_skip: Tensor | None, device: torch.device) -> None:
        self._on = {} if scale_and_skip is None else {scale_and_skip.device: scale_and_skip}
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None
        if scale_and_skip is not None and scale_and_skip.is_cuda and device.type == "cpu":
            there = torch.empty_like(scale_and_skip, device=device, pin_memory=True)
            there.copy_(scale_and_skip, non_blocking=True)
            self._coming = there, torch.cuda.current_stream(scale_and_skip.device).record_event()

    def on(self, device: torch.device) -> Tensor | None:
        """Copied there once."""
        if self._on and device not in self._on:
            if self._coming is not None and self._coming[0].device == device:
                self._on[device], event = self._coming
                event.synchronize()
            else:
                self._on[device] = next(iter(self._on.values())).to(device)
        return self._on.get(device)

    @property
    def forbids(self) -> bool:
        """The host has it, and nothing may be updated."""
        return any(
            scale_and_skip.device.type == "cpu" and bool(scale_and_skip[1]) for scale_and_skip in self._on.values()
        )


class UnitsJob:
    """The update of some units, see ``store.Job``.

    Attributes:
        groups: all parameter groups, as they are in this step.
        control: what gradients are multiplied by, and whether the step is made.
    """

    def __init__(
        self,
        update: UnitUpdate,
        groups: Sequence[FrozenGroup],
        scale_and_skip: _ScaleAndSkip,
        units: Sequence[tuple[Sequence[Segment], Tensor | None]],
        failed: Callable[[], None],
    ) -> None:
        self._note_failure = failed  # before the exception is seen: it may run beside the next forward
        self.grads = [grads for _, grads in units]
        # As they are in this step: the next one may freeze some while this update still runs.
        self._segments = [[(segment, segment.active) for segment in segments] for segments, _ in units]
        self._update, self.groups, self.control = update, groups, scale_and_skip
        for grads in self.grads:
            if grads is not None:
                scale_and_skip.on(
                    grads.device
                )  # here and now: the worker that may run this must not wait for the device

    @property
    def idle(self) -> bool:
        return self.control.forbids or all(grads is None for grads in self.grads)

    def replace(self, grads: Tensor, scale_and_skip: Tensor, segments: Sequence[tuple[Segment, bool]]) -> None:
        """Let the update of its one unit be by other gradients, flat, and another factor, both in host memory.

        Args:
            segments: of the unit, each with whether it is updated.
        """
        self.grads, self.control = [grads], _ScaleAndSkip(scale_and_skip, scale_and_skip.device)
        self._segments = [list(segments)]

    def __call__(self, outs: Sequence[Tensor | None]) -> None:
        try:
            self._run(outs)
        except BaseException:
            self._note_failure()
            raise

    def _run(self, outs: Sequence[Tensor | None]) -> None:
        calls: dict[tuple[int, bool], tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for segments, grads, out in zip(self._segments, self.grads, outs, strict=True):
            if grads is None:
                continue
            for s, active in segments:
                if not active:
                    if out is not None and s.low is None:  # all of ``out`` becomes the parameters
                        out[s.start : s.end].copy_(s.param.view(-1))
                    continue
                params, given, copies = calls.setdefault((s.group, out is None), ([], [], []))
                params.append(s.param)
                given.append(grads[s.start : s.end].to(s.param.device))
                if s.low is not None:
                    copies.append(s.low)
                elif out is not None:
                    copies.append(out[s.start : s.end])
        for (index, _), (params, given, copies) in calls.items():
            self._update(self.groups[index], params, given, copies, self.control.on(params[0].device))
        self.grads = [None] * len(self.grads)


def _on(scale_and_skip: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scale_and_skip is None else scale_and_skip.to(device)


def _piece(segment: Segment, group: dict[str, Any], grads: Tensor, copies: Tensor | None) -> Piece:
    fragment = segment.fragment
    assert fragment is not None
    return Piece(
        group,
        segment.param,
        grads[segment.start : segment.end].view(segment.shape),
        None if copies is None else copies[segment.start : segment.end].view(segment.shape),
        fragment.slot.shape,
        fragment.start,
        fragment.slot.index,
        fragment.slot.offset,
        fragment.shard_start,
    )


# -- the all-gather after a step -----------------------------------------------------------------------------------

# Of a launch: the first is short, for the next forward waits for it; each later one is twice as long as that before it,
# up to a millisecond of NVLink.
_FIRST_NBYTES, _LAST_NBYTES = 32 << 20, 256 << 20


class _Buffer(Protocol):
    """A flat buffer as the gathers after a step see it."""

    axis: Axis
    sharded: bool
    comm_stream: CommStream
    gathering: Gathering
    labels: Labels

    @property
    def full(self) -> Tensor: ...
    @property
    def shard(self) -> Tensor: ...
    def refresh(self) -> None: ...
    def check_views(self) -> None: ...
    def fill(self) -> None: ...
    def defer_gather(self, arrival: Awaited | None) -> bool: ...


def sync_weights(buffers: Sequence[_Buffer], *, whole: bool) -> None:
    """Make what was written to ``owned`` the parameters' values on all ranks. Collective.

    Args:
        whole: every rank wrote everything.

    Raises:
        DsHfError: parameters are no longer where their buffer keeps them.
    """
    together: list[_Buffer] = []
    nbytes, enough = 0, _FIRST_NBYTES
    for buffer in buffers:
        if buffer.sharded:
            buffer.refresh()
            continue
        buffer.check_views()
        if whole:
            continue
        if together and buffer.axis != together[0].axis:
            _gather(together)
            together, nbytes = [], 0
        together.append(buffer)
        nbytes += buffer.full.nbytes
        if nbytes >= enough:
            _gather(together)
            together, nbytes, enough = [], 0, min(2 * enough, _LAST_NBYTES)
    if together:
        _gather(together)


def _gather(buffers: Sequence[_Buffer]) -> None:
    comm_stream, axis = buffers[0].comm_stream, buffers[0].axis
    with comm_stream:
        copied = [buffer for buffer in buffers if buffer.gathering.region is not None]
        for buffer in copied:
            buffer.fill()
        if copied and copied[0].gathering.peers is not None:
            copied[0].gathering.peers.meet()  # users may write to parameters once they have arrived
        rest = [buffer for buffer in buffers if buffer.gathering.region is None]
        fulls, shards = [b.full for b in rest], [b.shard for b in rest]
        collectives.all_gather_each(fulls, shards, axis, [b.labels.weights for b in rest])
    arrival = comm_stream.event() if axis.world_size > 1 else None
    deferred = [buffer.defer_gather(arrival) for buffer in buffers]
    if not all(deferred):
        comm_stream.join()
