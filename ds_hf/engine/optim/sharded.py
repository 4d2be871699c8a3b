"""The optimizer of an engine: a torch optimizer whose parameters are master shards instead of the model's parameters.

Invariants
- Each trainable buffer has a master: fp32, over what the rank owns (its shard, or all where the plan replicates
  optimizer states). Where dtype and device allow, the master *is* the parameters' storage.
- A ``Segment`` is a stretch of a master that one parameter group updates; the inner optimizer's ``param_groups``
  hold segments, its group dictionaries stay the live ones, so schedulers built on either object work.
- ``step`` never leaves weights half updated by an overflow: it looks first, then updates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.optim.base import Piece, StreamingOptimizer, TensorwiseOptimizer, UnitPieces
from ds_hf.engine.optim.grad_norm import clip_coefficient, global_norm
from ds_hf.engine.optim.loss_scaler import LossScaler
from ds_hf.engine.optim.streaming import Narrow, UnitUpdate, streamed_update
from ds_hf.engine.zero.buffer import FlatBuffer, logical_shape
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.layout import Fragment
from ds_hf.engine.zero.reduction import Reducer

__all__ = ["Segment", "ShardedOptimizer"]


@dataclass(eq=False)
class Segment:
    """A stretch of one buffer's master, updated by one parameter group.

    Attributes:
        gradient: gradient buffer it takes its gradient from.
        group: index of the parameter group.
        start, end: elements of the owned tensor.
        shape: the parameter's shape when the segment is exactly one whole parameter handled on its own, else flat.
        param: the master weights as the inner optimizer sees them.
        fragment: the part of a parameter that it is, where the rule looks at whole parameters.
    """

    gradient: GradientBuffer
    group: int
    start: int
    end: int
    shape: torch.Size
    param: nn.Parameter
    fragment: Fragment | None = None


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
    """

    whole: bool
    device: torch.device
    max_norm: float
    check_overflow: bool
    elementwise: bool
    moments: torch.dtype = torch.float32
    stochastic: bool = False


class ShardedOptimizer(Optimizer):
    """What users hold as ``engine.optimizer``.

    Args:
        inner: the torch optimizer with the user's groups; its ``params`` are replaced by segments.
        groups: for each gradient buffer, the parameter group of each of its parameters.
        reducer: owner of the gradient buffers.
        scaler: loss scaler.
    """

    def __init__(
        self,
        inner: Optimizer,
        groups: dict[GradientBuffer, list[int]],
        reducer: Reducer,
        scaler: LossScaler,
        axis: Axis,
        policy: OptimizerPolicy,
        masters: dict[FlatBuffer, Tensor],
    ) -> None:
        self.parameter_offload: Any  # where parameters are sharded, for other libraries
        # Not Optimizer.__init__: groups and state are the inner optimizer's, by property.
        self.optimizer = inner
        self.reducer = reducer
        self.loss_scaler = scaler
        self.axis = axis
        self.policy = policy
        self.masters = masters
        self.overflow = False
        self._groups = groups
        self.segments: dict[GradientBuffer, list[Segment]] = {
            gradient: list(self._make_segments(gradient, indices)) for gradient, indices in groups.items()
        }
        self._take_over_state()
        self._given = [list(group["params"]) for group in inner.param_groups]  # what ``free`` gives back
        for index, group in enumerate(inner.param_groups):
            group["params"] = [s.param for ss in self.segments.values() for s in ss if s.group == index]
        wide = policy.moments is torch.float32
        if isinstance(inner, StreamingOptimizer) and any(m.dtype is torch.bfloat16 for m in masters.values()):
            inner.fp32_optimizer_states, inner.stochastic_rounding = wide, policy.stochastic
        self._update: UnitUpdate | None = streamed_update(inner, Narrow(wide, policy.stochastic))
        self._norm: Tensor | None = None
        self._norm_scale = 1.0
        self._gradients = {gradient.buffer: gradient for gradient in groups}
        self._axis_device = next((buffer.device for buffer in masters), policy.device)
        for buffer in masters:
            buffer.states = self
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    def _make_segments(self, gradient: GradientBuffer, indices: Sequence[int]) -> Iterator[Segment]:
        """Stretches of the owned tensor: one a group where the rule is elementwise, else one a parameter."""
        master = self.masters[gradient.buffer]
        runs: list[tuple[int, int, int, Fragment | None]] = []
        for fragment in gradient.buffer.layout.fragments(gradient.buffer.axis.rank, whole=self.policy.whole):
            group, start = indices[fragment.slot.index], fragment.shard_start
            end = start + fragment.numel
            if self.policy.elementwise and runs and runs[-1][0] == group:
                runs[-1] = (group, runs[-1][1], end, None)
            else:
                runs.append((group, start, end, None if self.policy.elementwise else fragment))
        for group, start, end, piece in runs:
            shape = piece.slot.shape if piece is not None and piece.whole else torch.Size([end - start])
            param = nn.Parameter(master[start:end].view(shape), requires_grad=True)
            yield Segment(gradient, group, start, end, shape, param, piece)

    def _take_over_state(self) -> None:
        """Cut state that the inner optimizer already has for the model's parameters into state of the segments.

        Adagrad makes its sums at construction; an optimizer that has stepped before brings its moments.
        """
        before, self.optimizer.state = self.optimizer.state, defaultdict(dict)
        if not before:
            return
        elementwise = {
            key
            for param, state in before.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == logical_shape(param) and key != "step"
        }
        for gradient, segments in self.segments.items():
            buffer = gradient.buffer
            fragments = list(buffer.layout.fragments(buffer.axis.rank, whole=self.policy.whole))
            for segment in segments:
                inside = [f for f in fragments if segment.start <= f.shard_start < segment.end]
                states = [before.get(buffer.params[f.slot.index], {}) for f in inside]
                for key, value in states[0].items():
                    if key in elementwise:
                        value = torch.zeros_like(segment.param, dtype=value.dtype)
                        for fragment, state in zip(inside, states, strict=True):
                            start, length = fragment.shard_start - segment.start, fragment.numel
                            piece = state[key].reshape(-1)[fragment.start : fragment.start + length]
                            value.view(-1)[start : start + length].copy_(piece)
                    self.optimizer.state[segment.param][key] = value

    # -- torch.optim's interface ----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("parameter groups are fixed once initialize() has sharded them: add the group before it")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all accumulated gradients."""
        self.reducer.clear()

    def train(self) -> None:
        """Passed on to optimizers that have a train mode (schedule-free)."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Passed on to optimizers that have an eval mode (schedule-free)."""
        getattr(self.optimizer, "eval", lambda: None)()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: the inner optimizer's state over its segments, masters and loss scaler."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": list(self.masters.values()),
            "loss_scaler": self.loss_scaler.state_dict(),
            "world_size": self.axis.world_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; for another world size use the engine's checkpoints.

        Raises:
            ValueError: it was made with another world size.
        """
        if state_dict["world_size"] != self.axis.world_size:
            raise ValueError(
                f"this optimizer state belongs to world size {state_dict['world_size']}, not {self.axis.world_size}; "
                "engine.load_checkpoint() loads at any world size"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        with torch.no_grad():
            for (buffer, master), saved in zip(self.masters.items(), state_dict["masters"], strict=True):
                master.copy_(saved)
                self.masters_changed(buffer)

    # -- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Norm, clip and unscale, then update shard after shard and publish; skipped when a gradient overflowed."""
        if closure is not None:
            raise ValueError("closures are not supported: gradients are reduced during backward, not in step()")
        self.reducer.finish()
        scale = self.loss_scaler.scale
        owned = [g.owned for g in self.segments if g.owned is not None]
        device = next((t.device for t in owned), self.policy.device)
        self._norm = global_norm(
            owned, self.axis, whole=self.policy.whole, device=device, axis_device=self._axis_device
        )
        self._norm_scale = scale
        self.overflow = self.policy.check_overflow and not bool(torch.isfinite(self._norm))
        if not self.overflow:
            self._apply(None if scale == 1.0 and self.policy.max_norm <= 0 else self._control(self._norm, scale))
        self.reducer.clear()
        self.loss_scaler.update(self.overflow)

    def _control(self, norm: Tensor, scale: float) -> Tensor:
        """What the kernels read: the factor that unscales and clips, and a flag that is never set here."""
        return torch.stack([clip_coefficient(norm, scale, self.policy.max_norm), torch.zeros_like(norm)])

    def _apply(self, control: Tensor | None) -> None:
        """Update and publish, unit after unit where the rule can."""
        if isinstance(self.optimizer, TensorwiseOptimizer):
            for hook in self._optimizer_step_pre_hooks.values():
                hook(self.optimizer, (), {})
            self._step_pieces(self.optimizer, control)
            for after in self._optimizer_step_post_hooks.values():
                after(self.optimizer, (), {})
        elif self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            self._step_whole(control)
        elif self._update is not None:
            self._step_units(self._update, control)
        else:
            self._step_whole(control)

    def _step_units(self, update: UnitUpdate, control: Tensor | None) -> None:
        for gradient, segments in self.segments.items():
            grads = self._owned_gradient(gradient)
            copies = self._copies(gradient.buffer)
            if grads is not None:
                for index, group in enumerate(self.param_groups):
                    mine = [s for s in segments if s.group == index]
                    if mine:
                        update(
                            group,
                            [s.param for s in mine],
                            [grads[s.start : s.end] for s in mine],
                            [] if copies is None else [copies[s.start : s.end] for s in mine],
                            _on(control, grads.device),
                        )
            gradient.clear()
            self._publish(gradient.buffer, copies if grads is not None else None)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it

    def _step_pieces(self, optimizer: TensorwiseOptimizer, control: Tensor | None) -> None:
        units, copies_of = [], {}
        for gradient, segments in self.segments.items():
            grads, copies = self._owned_gradient(gradient), self._copies(gradient.buffer)
            copies_of[gradient] = copies if grads is not None else None
            layout = gradient.buffer.layout
            given = self._groups[gradient]
            pieces = [_piece(s, self.param_groups[s.group], grads, copies) for s in segments if grads is not None]
            units.append(
                UnitPieces(
                    pieces,
                    len(layout.slots),
                    layout,
                    [self.param_groups[index] for index in given],
                    gradient.dtype,
                    None if self.policy.whole or self.axis.world_size == 1 else self.axis,
                    self.masters[gradient.buffer].device,
                    self._axis_device,
                )
            )
        device = self.policy.device
        optimizer.update_pieces(units, _on(control, device))
        for gradient, copies in copies_of.items():
            gradient.clear()
            self._publish(gradient.buffer, copies)
        optimizer._opt_called = True

    def _step_whole(self, control: Tensor | None) -> None:
        """``optimizer.step()`` itself, over gradients in ``param.grad``."""
        for gradient, segments in self.segments.items():
            grads = self._owned_gradient(gradient)
            if grads is not None:
                grads = grads.to(self.masters[gradient.buffer].dtype)
                if control is not None:
                    grads.mul_(control[0].to(grads.device))
            for s in segments:
                s.param.grad = None if grads is None else grads[s.start : s.end].view(s.shape)
        self.optimizer.step()
        for gradient, segments in self.segments.items():
            for s in segments:
                s.param.grad = None
            self._publish(gradient.buffer)

    def _owned_gradient(self, gradient: GradientBuffer) -> Tensor | None:
        """The reduced gradient beside its master, as it was reduced."""
        return None if gradient.owned is None else gradient.owned.to(self.masters[gradient.buffer].device)

    def _copies(self, buffer: FlatBuffer) -> Tensor | None:
        """Where the kernel writes the parameters next to the masters; None where the masters are the parameters."""
        owned, master = buffer.owned(whole=self.policy.whole), self.masters[buffer]
        if owned.data_ptr() == master.data_ptr():
            return None
        if owned.device == master.device:
            return owned
        pin = master.is_pinned()
        return torch.empty(owned.shape, dtype=owned.dtype, device=master.device, pin_memory=pin)

    def _publish(self, buffer: FlatBuffer, copies: Tensor | None = None) -> None:
        """Give the parameters the masters' values, from ``copies`` where they were written already."""
        owned = buffer.owned(whole=self.policy.whole)
        source = self.masters[buffer] if copies is None else copies
        if owned.data_ptr() != source.data_ptr():
            owned.copy_(source)
        buffer.publish(whole=self.policy.whole)

    def grad_norm(self) -> float | None:
        """Unscaled global norm, before clipping, of the last step; ``None`` before the first. Synchronizes.

        Infinite when a gradient was inf or nan: accelerate's users compare it with numbers.
        """
        if self._norm is None:
            return None
        norm = float(self._norm) / self._norm_scale
        return norm if math.isfinite(norm) else math.inf

    def free(self) -> None:
        """Drop masters, moments and gradients (``engine.destroy``); the inner optimizer has the model's own again."""
        self.reducer.clear()
        for group, params in zip(self.optimizer.param_groups, self._given, strict=True):
            group["params"] = params
        self.optimizer.state.clear()
        self.masters.clear()
        self.segments.clear()
        self._gradients.clear()
        self._groups.clear()

    # -- states of single buffers (zero.access, GatheredParameters, checkpoints) -----------------------------------

    @property
    def whole(self) -> bool:
        return self.policy.whole

    def master(self, buffer: FlatBuffer) -> Tensor | None:
        """Master weights over what this rank owns."""
        return self.masters.get(buffer)

    @torch.no_grad()
    def values_changed(self, buffer: FlatBuffer) -> None:
        """The parameters were written from outside: the masters follow."""
        master = self.masters.get(buffer)
        owned = buffer.owned(whole=self.policy.whole)
        if master is not None and owned.data_ptr() != master.data_ptr():
            master.copy_(owned)

    @torch.no_grad()
    def masters_changed(self, buffer: FlatBuffer) -> None:
        """The masters were written from outside: the parameters follow. Collective."""
        self._publish(buffer)

    def gradient(self, buffer: FlatBuffer) -> Tensor | None:
        """Averaged, unscaled fp32 gradient over what this rank owns; collective while sums are still partial."""
        gradient = self._gradients[buffer]
        gradient.collect()
        if gradient.partial is not None:
            gradient.reduce()
        if gradient.owned is None:
            return None
        return gradient.owned.float() / self.loss_scaler.scale

    def set_gradient(self, buffer: FlatBuffer, value: Tensor) -> None:
        """Replace the averaged, unscaled gradient over what this rank owns."""
        gradient = self._gradients[buffer]
        assert gradient.owned is not None
        gradient.owned = (value * self.loss_scaler.scale).to(gradient.owned.device)

    def moments(self) -> list[str]:
        """Names of the tensor states that have one value for each element, e.g. ``exp_avg``."""
        names: dict[str, None] = {}
        for segments in self.segments.values():
            for segment in segments:
                for key, value in self.state.get(segment.param, {}).items():
                    if isinstance(value, Tensor) and value.numel() == segment.param.numel() and value.dim() > 0:
                        names.setdefault(key)
        return list(names)

    @property
    def moment_dtypes(self) -> set[torch.dtype]:
        """Dtypes that moments have, or will have when the first step makes them."""
        made = {v.dtype for s in self.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() > 0}
        return made or {self._moment_dtype(master) for master in self.masters.values()}

    def _moment_dtype(self, master: Tensor) -> torch.dtype:
        """Dtype that a moment of ``master`` has when the first step makes it."""
        wide = isinstance(self.optimizer, StreamingOptimizer) and self.optimizer.fp32_optimizer_states
        narrow = master.dtype is torch.bfloat16 and self._update is not None and self.policy.moments is torch.float32
        return torch.float32 if wide or narrow else master.dtype

    def moment(self, buffer: FlatBuffer, key: str) -> Tensor | None:
        """A moment over what this rank owns, flat; ``None`` when no parameter of the buffer has it."""
        master = self.masters[buffer]
        result = torch.zeros_like(master, dtype=self._moment_dtype(master))
        found = False
        for segment in self.segments[self._gradients[buffer]]:
            value = self.state.get(segment.param, {}).get(key)
            if isinstance(value, Tensor) and value.numel() == segment.param.numel():
                result[segment.start : segment.end].copy_(value.reshape(-1))
                found = True
        # A rank may own nothing of this buffer's trainable part: it still takes part in collectives.
        return result if found or (key in self.moments()) else None

    @torch.no_grad()
    def set_moment(self, buffer: FlatBuffer, key: str, value: Tensor, *, create: bool = True) -> None:
        """Write a moment over what this rank owns; makes the state where there is none yet, unless not to ``create``.

        Rules that keep other moments for matrices than for vectors must not get those that are not theirs.
        """
        master = self.masters[buffer]
        for segment in self.segments[self._gradients[buffer]]:
            state = self.state[segment.param]
            piece = value[segment.start : segment.end].view(segment.shape)
            if key in state:
                state[key].copy_(piece)
            elif create:
                state[key] = piece.to(device=master.device, dtype=self._moment_dtype(master), copy=True)

    @property
    def nbytes(self) -> int:
        """Bytes of masters (not counting those that are the parameters themselves) and tensor states."""
        total = 0
        for buffer, master in self.masters.items():
            if master.data_ptr() != buffer.owned(whole=self.policy.whole).data_ptr():
                total += master.numel() * master.element_size()
        for state in self.state.values():
            total += sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor) and v.dim() > 0)
        return total

    # -- names that DeepSpeed users know ---------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return hasattr(self.loss_scaler, "hysteresis") or type(self.loss_scaler).__name__ == "DynamicLossScaler"

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """Master weights, one flat tensor a buffer."""
        return list(self.masters.values())

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups


def _on(control: Tensor | None, device: torch.device) -> Tensor | None:
    return None if control is None else control.to(device)


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
