"""The optimizer of an engine: a torch optimizer whose parameters are master shards instead of the model's parameters.

Invariants
- Each trainable buffer has a master: fp32, over what the rank owns (its shard, or all where the plan replicates
  optimizer states). Where dtype and device allow, the master *is* the parameters' storage, or that is its high half
  and the low one lies beside it (``ops/split_master.py``).
- A ``Segment`` is a stretch of a master that one parameter group updates; the inner optimizer's ``param_groups``
  hold segments, its group dictionaries stay the live ones, so schedulers built on either object work.
- ``step`` never leaves weights half updated by an overflow: it looks first, then updates, or the kernels look.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.comm.block_collectives import BlockSums
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.optim.base import StreamingOptimizer, TensorwiseOptimizer
from ds_hf.engine.optim.buffer_states import BufferStates
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.optim.loss_scaler import LossScaler
from ds_hf.engine.optim.outcome import NonFinite, Outcome, Unused, global_scale_and_skip, shared
from ds_hf.engine.optim.segments import Segment, cut_segments, fragments_of, part_segments, take_over_state
from ds_hf.engine.optim.stepping import OptimizerPolicy, Stepping, sync_weights
from ds_hf.engine.optim.store import StateStore
from ds_hf.engine.optim.streaming import Narrow, UnitUpdate, streamed_update
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.errors import ConfigError, DsHfError, NonFiniteError
from ds_hf.log import warn_once

__all__ = ["OptimizerPolicy", "Segment", "ShardedOptimizer"]


class ShardedOptimizer(BufferStates, Optimizer):
    """What users hold as ``engine.optimizer``; ``deepspeed_api.optimizer`` adds DeepSpeed's names.

    Args:
        inner: the torch optimizer with the user's groups; its ``params`` are replaced by segments.
        groups: for each gradient buffer, the parameter group of each of its parameters.
        reducer: owner of the gradient buffers.
        scaler: loss scaler.
        mesh: the processes, over which norms are taken.
        nonfinite: told of gradient norms.
        low_bits: of the masters that are split; ``masters`` has the parameters for them.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DsHfError(
            "an engine's optimizer cannot be copied or pickled: its states are views of the engine's. Copy "
            "optimizer.state_dict(), or write engine.save_checkpoint(folder)"
        )

    def __init__(
        self,
        inner: Optimizer,
        groups: dict[GradientBuffer, list[int]],
        reducer: Reducer,
        scaler: LossScaler,
        mesh: Mesh,
        policy: OptimizerPolicy,
        masters: dict[FlatBuffer, Tensor],
        store: StateStore,
        nonfinite: NonFinite,
        low_bits: dict[FlatBuffer, Tensor] | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups and state are the inner optimizer's, by property.
        self.optimizer = inner
        self.reducer, reducer.optimizer = reducer, weakref.ref(self)
        self.loss_scaler = scaler
        self.axis, self.world = mesh.replicas, mesh.world
        self.shard_axis = next((buffer.axis for buffer in masters if buffer.axis == mesh.inner), self.axis)
        self.policy = policy
        self.versions = {}  # of the parameters of a buffer before the last step, where their masters lie beside them
        self.masters = masters
        self.low_bits = {} if low_bits is None else low_bits
        self.store = store
        self.nonfinite = nonfinite
        self.before_overflow: Callable[[], None] = lambda: None  # called before it is read
        self.before_step: Callable[[], None] = lambda: None  # called before each: what scripts have done is seen
        self.on_edit: Callable[[], None] = lambda: None  # called where a script has added a group
        self.brought: set[tuple[int, str]] = set()  # options of a group that a checkpoint added, until the next load
        self.segments = _segments(groups, masters, self.low_bits, policy)
        take_over_state(inner, self.segments, whole=policy.whole)
        self.given = [list(group["params"]) for group in inner.param_groups]  # what ``free`` gives back
        self.groups = groups
        self._mode = ""  # of an optimizer that has modes
        for name in ("train", "eval"):  # scripts may hold, and ask, their own object
            if hasattr(inner, name):
                setattr(inner, name, partial(self._change_mode, name))
        self._mixed: set[GradientBuffer] = set()  # of which some parameters are frozen
        self._gradients: dict[FlatBuffer, GradientBuffer] = {}
        self._outcome, self._unused = Outcome(), Unused()
        device = next((buffer.device for buffer in masters), policy.device)
        self._apply = Stepping(inner, None, self.segments, groups, masters, policy, device, store)
        self._connect()
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    # -- torch.optim's interface ----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        for buffer in self.masters:
            if not buffer.sharded:
                buffer.gather()  # an update that was not waited for yet may be writing it
        self.store.wait_for_states()
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
        """Parameters of the model, which join or move there, see ``regrouping``.

        Raises:
            DsHfError: they are none of the model's, or may not join.
        """
        self.optimizer.add_param_group(param_group)
        try:
            self.on_edit()
        except DsHfError:
            del self.optimizer.param_groups[-1]
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all accumulated gradients, as in torch; within an accumulation that is told."""
        if self.reducer.accumulates:
            warn_once(
                "optimizer.zero_grad() within an accumulation has dropped the gradients of the micro-batches before it "
                "(said once), as in torch: the step is made of those that follow, divided by all. Leave it out: the "
                "engine clears gradients after each step by itself",
                about="gradients of an accumulation",
            )
        self.reducer.clear()

    def train(self) -> None:
        """Passed on to optimizers that have a train mode (schedule-free). Collective, as ``eval``."""
        self._change_mode("train")

    def eval(self) -> None:
        """Passed on to optimizers that have an eval mode (schedule-free), which moves the weights. Collective where the
        mode changes: each process moves what it owns."""
        self._change_mode("eval")

    def _change_mode(self, name: str) -> None:
        change = getattr(type(self.optimizer), name, None)
        if change is None:
            return
        self.settle()
        before, self._mode = self._modes(), name
        change(self.optimizer)
        if self._modes() != before:
            self._apply.write_weights(dict.fromkeys(self.masters))

    def _modes(self) -> list[Any]:
        """The last that was asked for, and that of each group, which a checkpoint brings."""
        return [self._mode, *(group.get("train_mode") for group in self.optimizer.param_groups)]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: the inner optimizer's state over its segments, masters and loss scaler.

        Raises:
            DsHfError: it cannot be in memory at once.
        """
        self._require_all("state_dict()")
        self.settle()
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [self._whole_master(buffer) for buffer in self.masters],
            "loss_scaler": self.loss_scaler.state_dict(),
            "world_size": self.shard_axis.world_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; for another world size use the engine's checkpoints.

        Raises:
            ValueError: it was made with another world size.
        """
        if state_dict["world_size"] != self.shard_axis.world_size:
            raise ValueError(
                f"this optimizer state belongs to world size {state_dict['world_size']}, not "
                f"{self.shard_axis.world_size}; "
                "engine.load_checkpoint() loads at any world size"
            )
        self._require_all("load_state_dict()")
        self.settle()
        with self._params_beside_states():
            self.optimizer.load_state_dict(state_dict["optimizer"])
        _restore_dtypes(self.optimizer, state_dict["optimizer"])
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        with torch.no_grad():
            for buffer, saved in zip(self.masters, state_dict["masters"], strict=True):
                master = self.master(buffer)
                assert master is not None
                self.write_master(buffer, master.copy_(saved))
                self.masters_changed(buffer)

    def settle(self, *, last: bool = False) -> None:
        """Finish updates that go on beside training, sync the weights. Collective where ``ds_hf.offload.delayed`` or
        ``zenflow`` is.

        Args:
            last: make those that were put off, too.

        Raises:
            DsHfError: the last update ended in an exception.
        """
        try:
            for done in self.store.settle(last=last):
                sync_weights([gradient.buffer for gradient in done], whole=self.policy.whole)
        finally:
            if self._apply.unfinished:
                raise DsHfError(
                    "the last step failed halfway, so that some weights are a step ahead of others: nothing is saved. "
                    "Start again from the last checkpoint, or load it"
                )

    def forget_failure(self) -> None:
        """Everything is going to be replaced by a checkpoint. Updates that are still running end first."""
        with contextlib.suppress(Exception):
            self.settle(last=True)
        self._apply.forget_failure()
        if isinstance(self.optimizer, TensorwiseOptimizer):
            self.optimizer.forget()
        for blocks, _ in self.feedback:
            blocks.forget_errors()

    def bring_together(self) -> None:
        """Before a checkpoint: let all processes have the same of what is replicated, and updates that were put off be
        made. Collective."""
        self.settle(last=True)
        if isinstance(self.optimizer, TensorwiseOptimizer) and self.optimizer.synchronise():
            self._apply.write_weights(dict.fromkeys(self.masters))
        for blocks, _ in self.feedback:
            blocks.share_errors()

    def take_in(self) -> None:
        """``groups`` and ``masters`` have further buffers: parameters that were frozen are to be updated."""
        self.settle()
        new = {gradient: indices for gradient, indices in self.groups.items() if gradient not in self.segments}
        self.segments.update(_segments(new, self.masters, self.low_bits, self.policy))
        self._connect()

    def part(self, gradient: GradientBuffer, keys: Sequence[Hashable]) -> None:
        """Let each segment have parameters of one key only, of those in ``keys``, one for each parameter."""
        segments, whole = self.segments[gradient], self.policy.whole
        if all(len({keys[f.slot.index] for f in inside}) == 1 for _, inside in fragments_of(segments, whole=whole)):
            return
        self.settle()
        self.store.wait_for_states()
        self.segments[gradient] = part_segments(self.optimizer, segments, keys, whole=whole)
        self._connect()

    def regroup(self, given: list[list[Any]], group_of: Mapping[int, int]) -> None:
        """Let parameters be of other groups.

        Args:
            given: the parameters that each group lists.
            group_of: of each of them the group, by ``id``.
        """
        self.given = given
        for gradient in self.segments:
            indices = [group_of[id(param)] for param in gradient.buffer.params]
            self.part(gradient, indices)
            for segment, inside in fragments_of(self.segments[gradient], whole=self.policy.whole):
                segment.group = indices[inside[0].slot.index]
            self.groups[gradient][:] = indices
        self._connect()

    def _connect(self) -> None:
        """Let everything that knows segments know those that there are now."""
        inner, whole = self.optimizer, self.policy.whole
        _give_segments(inner, self.segments)
        self.listed = [(group, group["params"], tuple(group["params"])) for group in inner.param_groups]
        split = self.store.bind(inner, self.segments)
        for buffer in split:
            self._split_master(buffer)
        self._apply.update = _update_of(inner, self.policy, self.masters, self.low_bits, self.store)
        self._gradients.update((gradient.buffer, gradient) for gradient in self.segments)
        if split:
            sync_weights(split, whole=whole)  # splitting rounds ties away from zero
        for buffer in self.masters:
            buffer.states = self

    def _choose_active(self) -> None:
        """Find the segments that the step updates. As in torch, what was frozen whenever the model was called since the
        last step has no gradient and stays as it is, with its moments."""
        mixed = {gradient for gradient in self.segments if gradient.unasked and not gradient.sleeps}
        for gradient in self.segments if mixed or self._mixed else ():
            if gradient.sleeps or gradient not in mixed | self._mixed:
                continue
            self.part(gradient, [index in gradient.unasked for index in range(len(gradient.buffer.params))])
            for segment, inside in fragments_of(self.segments[gradient], whole=self.policy.whole):
                segment.active = inside[0].slot.index not in gradient.unasked
        self._mixed = mixed | {gradient for gradient in self._mixed if gradient.sleeps}

    @property
    def feedback(self) -> list[tuple[BlockSums, FlatBuffer]]:
        """Sums of gradients that keep what rounding loses, in the order of the buffers."""
        return [(g.feedback, g.buffer) for g in self.segments if g.feedback is not None]

    def _require_all(self, what: str) -> None:
        if self.store.splits:
            raise DsHfError(
                f"{what} of this optimizer: {self.store.splits}; use engine.save_checkpoint() and load_checkpoint()"
            )

    # -- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Norm, clip and unscale, then update shard after shard; skipped when a gradient overflowed."""
        if closure is not None:
            raise ValueError("closures are not supported: gradients are reduced during backward, not in step()")
        if self.reducer.watch.watched:
            self.reducer.watch.end()
        self.before_step()
        self.reducer.finish()
        self._choose_active()
        in_memory = {} if self.store.splits else self.optimizer.state
        self._unused.look(self.optimizer, self.segments, in_memory, whole=self.policy.whole)
        scale, checked = self.loss_scaler.scale, self.policy.check_overflow
        owned = [(g.owned, self.owners(g)) for g in self.segments if g.owned is not None and g.squares is None]
        known = [shared(g.squares, self.owners(g)) for g in self.segments if g.squares is not None]
        max_norm, later = self.policy.max_norm, self._decides_later
        scale_and_skip = global_scale_and_skip(
            [gradient for gradient, _ in owned],
            self.world,
            alone=self.owns_all,
            device=self._apply.axis_device,
            owners=[owners for _, owners in owned],
            known=known,
            scale=scale,
            max_norm=max_norm,
            checked=checked and later,
        )
        self._outcome.take(scale_and_skip[2], scale, checked)
        self._look_ahead()
        if later or not self._outcome.overflow:
            if self.low_bits and not self._apply.by_unit:
                self.join_masters()
            plain = scale == 1.0 and max_norm <= 0 and not (checked and later)
            self._apply(None if plain else scale_and_skip[:2])
        self.reducer.clear()
        if not self._decides_later:
            self.loss_scaler.update(self._outcome.overflow)

    @property
    def owns_all(self) -> bool:
        """This process owns all of the model: a sum over what it owns needs no other process. Not where it has its own
        gradients: their norm is the root mean square of all processes' norms, at least that of the mean."""
        if self.world.world_size == 1:
            return True
        own = isinstance(self.optimizer, TensorwiseOptimizer) and not self.optimizer.reduces
        return self.policy.whole and self.policy.alike and self.world == self.axis and not own

    def owners(self, gradient: GradientBuffer) -> int:
        """How many processes own the same of ``gradient``, where sums are taken over the world."""
        return 1 if self.owns_all else gradient.owners

    def _look_ahead(self) -> None:
        """Before the update: if the host has the norm, or has to wait for it, see whether it is finite.

        Raises:
            NonFiniteError: it is not, and that ends training.
        """
        # A scale that adapts makes the host wait for the norm anyway, and overflows are an ordinary part of its search.
        dynamic = self.loss_scaler.dynamic
        self._outcome.looked_at = dynamic or self._outcome.on_host or self.nonfinite.waits
        if not self._outcome.looked_at:
            return
        together = not dynamic and (self._outcome.on_host or self.nonfinite.mode == "error")
        norm = self._outcome.value
        if math.isfinite(norm):
            self.nonfinite.fine()
            return
        if dynamic and not (self.loss_scaler.at_minimum or self.nonfinite.bad_loss):
            return
        values = ((g.buffer, owned) for g in self.segments if (owned := g.settled()) is not None)
        try:
            self.nonfinite.tell(norm, values, together=together, device=self._apply.axis_device)
        except NonFiniteError:
            self.reducer.clear()
            raise

    def look_back(self, *, wait: bool = False) -> None:
        """After the update: see whether the last step's norm was finite, if that is known by now.

        Args:
            wait: until it is.
        """
        if self._outcome.looked_at or not (wait or self._outcome.known):
            return
        self._outcome.looked_at = True
        norm = self._outcome.value
        if math.isfinite(norm):
            self.nonfinite.fine()
            return
        became = not (self._outcome.checked or self.store.splits)
        masters = ((buffer, master) for buffer in self.masters if (master := self.master(buffer)) is not None)
        self.nonfinite.tell(norm, masters if became else (), together=False, device=self._apply.axis_device)

    @property
    def _decides_later(self) -> bool:
        """Whether ``step`` goes on before the host knows if it is applied, see ``StateStore.skips``.

        Not with a loss scale that changes, which the next forward needs.
        """
        own = self._apply.update is not None and not isinstance(self.optimizer, TensorwiseOptimizer)
        return own and self.store.skips and not self.loss_scaler.dynamic and not self._apply.observed

    @property
    def learns_later(self) -> bool:
        """Whether the host may not know yet when ``step`` returns."""
        return self._decides_later and self._apply.axis_device.type != "cpu"

    @property
    def overflow(self) -> bool:
        """The last step was skipped because a gradient was inf or nan. Waits for the gradients' norm."""
        self.before_overflow()
        return self.skipped

    @property
    def skipped(self) -> bool:
        """As ``overflow``, for the engine."""
        return self._outcome.overflow

    @property
    def outcome_known(self) -> bool:
        """Whether ``overflow`` and ``grad_norm`` answer without waiting."""
        return self._outcome.known

    def grad_norm(self) -> float | None:
        """Unscaled global norm, before clipping, of the last step; ``None`` before the first. Waits for it.

        Infinite when a gradient was inf or nan: accelerate's users compare it with numbers.
        """
        norm = self._outcome.norm if self._outcome.taken else None
        self.look_back()
        return norm

    def free(self) -> None:
        """Drop masters, moments and gradients (``engine.destroy``); the inner optimizer has the model's own again."""
        self.reducer.clear()
        for name in ("train", "eval"):
            vars(self.optimizer).pop(name, None)
        for group, params in zip(self.optimizer.param_groups, self.given, strict=False):
            group["params"] = params
        self.store.close()  # first: updates that go on read the states
        self.optimizer.state.clear()
        self.masters.clear()
        self.low_bits.clear()
        self.segments.clear()
        self.listed.clear()
        self._gradients.clear()
        self._apply.groups.clear()


def _segments(
    groups: Mapping[GradientBuffer, list[int]],
    masters: Mapping[FlatBuffer, Tensor],
    low_bits: Mapping[FlatBuffer, Tensor],
    policy: OptimizerPolicy,
) -> dict[GradientBuffer, list[Segment]]:
    """The segments of each master, in the order of the groups' buffers."""
    found = {}
    for gradient, indices in groups.items():
        master, low = masters[gradient.buffer], low_bits.get(gradient.buffer)
        cut = cut_segments(gradient, indices, master, low, whole=policy.whole, elementwise=policy.elementwise)
        found[gradient] = list(cut)
    return found


def _give_segments(inner: Optimizer, segments: Mapping[GradientBuffer, list[Segment]]) -> None:
    """Let the groups of ``inner`` hold segments."""
    for index, group in enumerate(inner.param_groups):
        group["params"] = [s.param for ss in segments.values() for s in ss if s.group == index]


def _update_of(
    inner: Optimizer,
    policy: OptimizerPolicy,
    masters: Mapping[FlatBuffer, Tensor],
    low_bits: Mapping[FlatBuffer, Tensor],
    store: StateStore,
) -> UnitUpdate | None:
    """The update of single units, if ``inner`` has one, with the dtypes and the rounding that the policy asks for.

    Raises:
        ConfigError: it has none, and the store needs it.
    """
    wide = policy.moments is torch.float32
    narrow = any(m.dtype is torch.bfloat16 and b not in low_bits for b, m in masters.items())
    if isinstance(inner, StreamingOptimizer) and (narrow or low_bits):
        inner.fp32_optimizer_states, inner.stochastic_rounding = wide, policy.stochastic and narrow
    update = streamed_update(inner, Narrow(wide, policy.stochastic and narrow))
    if store.splits and update is None:
        raise ConfigError(
            f"{type(inner).__name__} does not update unit after unit, and {store.splits}: use AdamW, Lion, Adagrad "
            'or SGD, or "device": "cpu" in offload_optimizer'
        )
    if narrow and policy.stochastic and (update is None or isinstance(inner, FusedLamb)):
        warn_once(
            f"{type(inner).__name__} rounds bf16 master weights to nearest, so that small updates are lost: "
            "ds_hf.stochastic_rounding has no effect on it; AdamW and Lion round stochastically"
        )
    return update


def _restore_dtypes(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """torch casts every state to the dtype of its parameter: fp32 moments of 16-bit ones lose digits by that."""
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in zip(indices, params, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            live = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(live, Tensor) and live.dtype != value.dtype:
                optimizer.state[param][key] = value.to(live.device, copy=True)
