"""``engine.optimizer`` as users hold it: with the names by which DeepSpeed's users ask it about itself.

Lists and dictionaries are made when they are asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.comm import collectives
from ds_hf.engine.optim.loss_scaler import LossScaler, NoLossScaler, StaticLossScaler, checked_scale
from ds_hf.engine.optim.outcome import shared
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.zero.access import safe_get_full_grad
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.leaf import get_z3_leaf_modules

__all__ = ["EngineOptimizer", "ParameterOffload"]


class EngineOptimizer(ShardedOptimizer):
    """What users hold as ``engine.optimizer``."""

    # -- the inner optimizer itself -------------------------------------------------------------------------------

    @property
    def stands_for_inner(self) -> bool:
        """Nothing is divided, scaled or kept beside the parameters: DeepSpeed hands out the inner optimizer itself
        then, and scripts compare it with their own, and ask for its class."""
        alone = all(
            buffer.dtype is master.dtype is torch.float32 and buffer.device == master.device
            for buffer, master in self.masters.items()
        )
        return alone and self.policy.whole and not self.needs_scaler()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() sees beside the type
        return type(self.optimizer) if self.stands_for_inner else type(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (other is self.optimizer and self.stands_for_inner)

    def __hash__(self) -> int:
        return hash(self.optimizer)  # equal objects must have one

    # -- loss scale -----------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Factor for the next loss; may be set."""
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    @property
    def loss_scale_config(self) -> LossScaler:
        """What DeepSpeed keeps of the loss scale beside the scaler: here the scaler itself."""
        return self.loss_scaler

    @property
    def cur_iter(self) -> int:
        """Boundaries that a dynamic scale has seen."""
        return getattr(self.loss_scaler, "cur_iter", 0)

    @property
    def scale_window(self) -> int | None:
        return getattr(self.loss_scaler, "scale_window", None)

    external_loss_scale: float | None = None

    @property
    def custom_loss_scaler(self) -> bool:
        """Whether ``override_loss_scale`` was called."""
        return self.external_loss_scale is not None

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this scale from now on, whatever overflows.

        Raises:
            ValueError: it is not a positive number.
        """
        self.external_loss_scale = checked_scale(loss_scale)
        self.loss_scaler = StaticLossScaler(self.external_loss_scale)

    def needs_scaler(self) -> bool:
        """Whether a ``loss.backward()`` of one's own has to go through ``engine.scale``."""
        return not isinstance(self.loss_scaler, NoLossScaler)

    # -- gradients ------------------------------------------------------------------------------------------------

    @property
    def clip_grad(self) -> float:
        """``gradient_clipping``, 0 for none; may be set."""
        return self.policy.max_norm

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        self.policy = replace(self.policy, max_norm=float(value))

    @property
    def _global_grad_norm(self) -> float | None:
        return self.grad_norm()

    def _get_norm_groups(self) -> list[Tensor]:
        """L2 norm of the gradients of each parameter group, with the loss scale. Collective."""
        self.reducer.finish()
        squares = torch.zeros(len(self.optimizer.param_groups), device=self.policy.device)
        for gradient, segments in self.segments.items():
            owned = gradient.settled()
            for segment in segments if owned is not None else ():
                assert owned is not None
                square = owned[segment.start : segment.end].float().square().sum()
                squares[segment.group] += shared(square, self.owners(gradient))
        self.reducer.show()
        if not self.owns_all:
            collectives.all_reduce_sum(squares, self.world, "the gradient norms of the groups")
        return list(squares.sqrt())

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """For each group this rank's part of the gradient of each parameter, flat, with the loss scale: views that may
        be written to. Empty before there are reduced gradients, and after a step."""
        found: dict[int, list[Tensor]] = {}
        for index, params in enumerate(self.bit16_groups):
            for param in params:
                view = self._gradient_view(param)
                if view is not None:
                    found.setdefault(index, []).append(view)
        return found

    def _gradient_view(self, param: nn.Parameter) -> Tensor | None:
        home = home_of(param)
        gradient = None if home is None else next((g for g in self.segments if g.buffer is home.buffer), None)
        owned = None if gradient is None else gradient.settled()
        if owned is None or home is None:
            return None
        layout, rank = home.buffer.layout, home.buffer.axis.rank
        for fragment in layout.fragments(rank, whole=self.policy.whole):
            if fragment.slot is home.slot:
                return owned[fragment.shard_start : fragment.shard_start + fragment.numel]
        return owned[:0]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Group, index of the parameter in it, and the gradient, unscaled fp32: this rank's of as many equal parts as
        there are ranks, flat, the last padded with zeros. Collective."""
        return {
            index: {place: self._partition(param) for place, param in enumerate(params)}
            for index, params in enumerate(self.bit16_groups)
        }

    def _partition(self, param: nn.Parameter) -> Tensor:
        """An equal part of the gradient, which the flat buffers of ds_hf cut elsewhere."""
        gradient = safe_get_full_grad(param)
        home = home_of(param)
        assert home is not None
        axis = home.buffer.axis
        part = -(-home.slot.numel // axis.world_size)
        result = torch.zeros(part, device=home.buffer.device)
        if gradient is not None:
            mine = gradient.reshape(-1)[part * axis.rank : part * (axis.rank + 1)]
            result[: mine.numel()] = mine
        return result

    # -- parameters and masters -----------------------------------------------------------------------------------

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters that each group trains."""
        groups: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        places = {id(p): index for index, params in enumerate(self.given) for p in params}
        for buffer in self.masters:
            for param in buffer.params:
                groups[places[id(param)]].append(param)
        order = {id(p): place for params in self.given for place, p in enumerate(params)}
        return [sorted(params, key=lambda p: order[id(p)]) for params in groups]

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters behind each of ``fp32_partitioned_groups_flat``."""
        return [
            [
                gradient.buffer.params[fragment.slot.index]
                for fragment in gradient.buffer.layout.fragments(gradient.buffer.axis.rank, whole=self.policy.whole)
                if segment.start <= fragment.shard_start < segment.end
            ]
            for gradient, segment in self._ordered_segments()
        ]

    @property
    def single_partition_of_fp32_groups(self) -> list[nn.Parameter]:
        """Master weights, flat: the keys of ``state``."""
        self.join_masters()
        return [segment.param for _, segment in self._ordered_segments()]

    fp32_partitioned_groups_flat = fp32_groups_flat = single_partition_of_fp32_groups

    @property
    def fp32_groups(self) -> list[list[nn.Parameter]]:
        """The same by parameter group: flat, each of one parameter or more."""
        self.join_masters()
        groups: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for _, segment in self._ordered_segments():
            groups[segment.group].append(segment.param)
        return groups

    def _ordered_segments(self) -> list[tuple[GradientBuffer, Segment]]:
        pairs = [(gradient, segment) for gradient, segments in self.segments.items() for segment in segments]
        return sorted(pairs, key=lambda pair: pair[1].group)

    nccl_start_alignment_factor = 2  # bytes of two fp16 elements: shards start at more than that

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """Of each buffer of whole parameters the ranks' parts, as views."""
        return [list(buffer.full.chunk(buffer.axis.world_size)) for buffer in self.masters if not buffer.sharded]

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The modules that were marked as leaves."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self.reducer.units[0].module)}

    @property
    def cpu_offload(self) -> bool:
        """Whether masters are in host memory while the model computes elsewhere."""
        return any(self.states_device(buffer) != buffer.device for buffer in self.masters)

    @property
    def dp_process_group(self) -> Any:
        """The group of processes that masters are divided over."""
        return self.shard_axis.group if self.shard_axis.group is not None else torch.distributed.group.WORLD

    @property
    def partition_count(self) -> list[int]:
        """Number of parts, for each parameter group."""
        return [1 if self.policy.whole else self.shard_axis.world_size for _ in self.optimizer.param_groups]

    def refresh_fp32_params(self) -> None:
        """Take the masters from the parameters, which were written to."""
        for buffer in self.masters:
            self.values_changed(buffer)

    def update_lp_params(self) -> None:
        """Take the parameters from the masters, which were written to. Collective."""
        self.join_masters()
        for buffer in self.masters:
            self.masters_changed(buffer)


class ParameterOffload:
    """``engine.optimizer.parameter_offload``: the names under which TRL finds DeepSpeed's hooks around generation.

    TRL gathers all parameters, takes the hooks off, generates and registers them again. Here the hooks may stay: they
    find everything gathered, and ``GatheredParameters`` holds it. So there is nothing to take off.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """The hooks of ``module`` were never gone."""
