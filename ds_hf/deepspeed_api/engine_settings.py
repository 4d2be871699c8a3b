"""The settings of an engine under the method names of DeepSpeed's, one line each.

Bucket sizes and the like are what the configuration says; what travels together is a unit all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_hf.deepspeed_api.config import DeepSpeedConfig
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.engine import CoreEngine

if TYPE_CHECKING:
    from ds_hf.config.types.zero import OffloadOptimizerSection, OffloadParamSection

__all__ = ["SettingsNames"]


def _group(axis: Axis) -> dist.ProcessGroup | None:
    return dist.group.WORLD if axis.group is None else axis.group


class SettingsNames(CoreEngine):
    """A part of ``Engine``."""

    # -- processes ------------------------------------------------------------------------------------------------

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the data-parallel axis; where sequences are divided, of those that read other samples."""
        return _group(self.mesh.axis("data") if self.mesh.shape.sequence > 1 else self.axis)

    dp_group = data_parallel_group

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group over which gradients are reduced: data x sequence."""
        return _group(self.axis)

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group that shares a sequence, ``None`` where sequences are whole."""
        return _group(self.mesh.axis("sequence")) if self.mesh.shape.sequence > 1 else None

    @property
    def sequence_parallel_size(self) -> int:
        """Number of processes that share a sequence."""
        return self.mesh.shape.sequence

    @property
    def seq_dp_world_size(self) -> int:
        """Number of processes that gradients are averaged over."""
        return self.axis.world_size

    @property
    def mp_world_size(self) -> int:
        """Number of processes that hold different parts of the model."""
        return self.mesh.shape.model

    @property
    def checkpoint_mp_rank(self) -> int:
        """Which part of its stage's layers this process holds; 0 where it holds them whole."""
        return 0 if self.mesh.shape.tensor == 1 else self.mesh.axis("tensor").rank

    tp_size_asked = 0  # by tp_model_init

    def managed_gradient_accumulation(self) -> bool:
        return self.settings.managed_gradient_accumulation

    def tensor_parallel_config(self) -> Any:
        """The section ``tensor_parallel``."""
        return self.settings.tensor_parallel

    # -- numbers --------------------------------------------------------------------------------------------------

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        given = self.plan.communication_dtype
        return getattr(torch, given) if given else self.compute_dtype or torch.float32

    def fp16_auto_cast(self) -> bool:
        return self.settings.fp16.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        return self.settings.fp16.fp16_master_weights_and_grads

    def bf16_master_weights_and_gradients(self) -> bool:
        return self.settings.bf16.bf16_master_weights_and_grads

    def amp_enabled(self) -> bool:
        return self.settings.amp.enabled

    def initial_dynamic_scale(self) -> float:
        return float(2**self.settings.fp16.initial_scale_power)

    def gradient_predivide_factor(self) -> float:
        return self.settings.gradient_predivide_factor

    def postscale_gradients(self) -> bool:
        return not self.settings.prescale_gradients

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Parameters whose gradients travel as indices and values: none, sparse gradients are filled up."""
        return set()

    def sparse_gradients_enabled(self) -> bool:
        return self.settings.sparse_gradients

    # -- optimizer ------------------------------------------------------------------------------------------------

    def optimizer_params(self) -> dict[str, Any] | None:
        return None if self.settings.optimizer is None else dict(self.settings.optimizer.params)

    def scheduler_params(self) -> dict[str, Any] | None:
        return None if self.settings.scheduler is None else dict(self.settings.scheduler.params)

    def zero_allow_untested_optimizer(self) -> bool:
        return self.settings.zero_allow_untested_optimizer

    # -- zero_optimization ----------------------------------------------------------------------------------------

    def zero_offload_optimizer(self) -> OffloadOptimizerSection | None:
        """The section, if optimizer states are offloaded."""
        section = self.settings.zero_optimization.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> OffloadParamSection | None:
        """The section, if parameters are offloaded."""
        section = self.settings.zero_optimization.offload_param
        return None if section.device == "none" else section

    def zero_use_cpu_optimizer(self) -> bool:
        return self.settings.zero_optimization.offload_optimizer.device != "none"

    def zero_cpu_offload(self) -> bool:
        return self.settings.zero_optimization.offload_optimizer.device == "cpu"

    def zero_has_nvme_offload(self) -> bool:
        zero = self.settings.zero_optimization
        return "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)

    def zero_hpz_partition_size(self) -> int:
        """Processes that gather parameters from each other at stage 3, 0 or 1 for all."""
        return self.settings.zero_optimization.zero_hpz_partition_size

    def zero_reduce_scatter(self) -> bool:
        return self.settings.zero_optimization.reduce_scatter

    def zero_overlap_comm(self) -> bool:
        """Its default depends on the stage."""
        return DeepSpeedConfig.of(self.settings, self.mesh.shape.data).overlaps_communication

    def zero_contiguous_gradients(self) -> bool:
        return self.settings.zero_optimization.contiguous_gradients

    def zero_reduce_bucket_size(self) -> int:
        return self.settings.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        return self.settings.zero_optimization.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        return self.settings.zero_optimization.allgather_partitions

    def zero_sub_group_size(self) -> int:
        return self.settings.zero_optimization.sub_group_size

    def zero_prefetch_bucket_size(self) -> int:
        return self.settings.zero_optimization.stage3_prefetch_bucket_size

    def zero_param_persistence_threshold(self) -> int:
        return self.settings.zero_optimization.stage3_param_persistence_threshold

    def zero_model_persistence_threshold(self) -> int:
        return self.settings.zero_optimization.stage3_model_persistence_threshold

    def zero_max_live_parameters(self) -> int:
        return self.settings.zero_optimization.stage3_max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        return self.settings.zero_optimization.stage3_max_reuse_distance

    def zero_ignore_unused_parameters(self) -> bool:
        return self.settings.zero_optimization.ignore_unused_parameters

    def zero_elastic_checkpoint(self) -> bool:
        return self.settings.zero_optimization.elastic_checkpoint

    def zero_load_from_fp32_weights(self) -> bool:
        return self.settings.zero_optimization.load_from_fp32_weights

    # -- checkpoints and reports ----------------------------------------------------------------------------------

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self.settings.checkpoint.tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self.settings.checkpoint.tag_validation == "Fail"

    def load_universal_checkpoint(self) -> bool:
        return self.settings.checkpoint.load_universal

    def log_level(self) -> str | None:
        return self.settings.log_level

    def wall_clock_breakdown(self) -> bool:
        return self.settings.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self.settings.memory_breakdown

    def dump_state(self) -> bool:
        return self.settings.dump_state

    def flops_profiler_enabled(self) -> bool:
        return self.settings.flops_profiler.enabled

    def flops_profiler_recompute_fwd_factor(self) -> float:
        return self.settings.flops_profiler.recompute_fwd_factor

    def flops_profiler_profile_step(self) -> int:
        return self.settings.flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        return self.settings.flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        return self.settings.flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        return self.settings.flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        return self.settings.flops_profiler.output_file

    def elasticity_enabled(self) -> bool:
        return self.settings.elasticity.enabled
