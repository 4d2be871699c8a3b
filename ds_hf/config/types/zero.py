"""Sections of ZeRO, offload and asynchronous I/O.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. Renamed keys do not appear here: ``check.rename`` has moved their values already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "AioSection",
    "LeafModuleSection",
    "LocoSection",
    "OffloadOptimizerSection",
    "OffloadParamSection",
    "ZenFlowSection",
    "ZeroSection",
]


@dataclass(frozen=True)
class OffloadParamSection:
    """Where parameters rest between uses (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


@dataclass(frozen=True)
class OffloadOptimizerSection:
    """Where master weights and optimizer states live, and where the optimizer runs."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8

    @property
    def pipeline(self) -> bool:
        """Whether files are read or written beside the update."""
        return self.pipeline_read or self.pipeline_write


@dataclass(frozen=True)
class ZenFlowSection:
    """Columns that are updated in every step, and when the others are, on the CPU."""

    topk_ratio: float = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: int | str = "auto"
    update_interval: int | str = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = 0.99
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: float = 0.5
    steps_per_epoch: int | None = None


@dataclass(frozen=True)
class LocoSection:
    """Error feedback for quantized gradients."""

    err_beta: float = 0.8
    reset_T: int = 1024  # noqa: N815


@dataclass(frozen=True)
class LeafModuleSection:
    """Modules gathered as a whole at stage 3 (mixture-of-experts blocks, where each process may run other experts)."""

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ZeroSection:
    """What ZeRO divides and where it keeps it. true and false, the form of 2020, mean stage 1 and 0."""

    stage: int = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParamSection = field(default_factory=OffloadParamSection)
    offload_optimizer: OffloadOptimizerSection = field(default_factory=OffloadOptimizerSection)
    zenflow: ZenFlowSection | None = None
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_model_persistence_threshold: int = 2**63 - 1
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: int = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: LocoSection | None = None
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModuleSection = field(default_factory=LeafModuleSection)


@dataclass(frozen=True)
class AioSection:
    """Asynchronous reading and writing, for NVMe offload."""

    block_size: int = 1_048_576
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False
