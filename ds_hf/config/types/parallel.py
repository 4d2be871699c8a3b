"""Sections of tensor, expert and elastic parallelism.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. Renamed keys do not appear here: ``check.rename`` has moved their values already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ElasticitySection",
    "ExpertParallelSection",
    "TPGroupSection",
    "TPPartitionSection",
    "TensorParallelSection",
]


@dataclass(frozen=True)
class TPGroupSection:
    """Group of processes."""

    tp_size: int = 1
    tp_grain_size: int = 1
    mpu: None = None
    tp_group: None = None


@dataclass(frozen=True)
class TPPartitionSection:
    """Own rules for dividing layers."""

    use_default_specs: bool = True
    strict_mode: bool = False
    embedding_partition_dim: int = 1
    lm_head_patterns: tuple[str, ...] = ("lm_head", "embed_out")
    layer_specs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TensorParallelSection:
    """Tensor parallelism for training (AutoTP)."""

    autotp_size: int = 0
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    tp_overlap_comm: bool = False
    vocab_parallel_lm_head: bool | None = None
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    tp: TPGroupSection = field(default_factory=TPGroupSection)
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = None
    partition_config: TPPartitionSection | None = None
    injection_policy_tuple: tuple[Any, ...] | None = None
    keep_module_on_host: bool = False
    kernel_inject: bool = False


@dataclass(frozen=True)
class ExpertParallelSection:
    """Expert parallelism for mixture-of-experts models (AutoEP)."""

    enabled: bool = False
    autoep_size: int = 1
    expert_tensor_parallel_size: int = 1
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = (
        None
    )
    use_grouped_mm: bool = True
    disable_triton_grouped_mm: bool = False
    validate_folding_routing: bool = False
    async_split_plan: bool = False
    moe_layer_pattern: str | None = None
    router_pattern: str | None = None
    expert_pattern: str | None = None
    shared_experts_pattern: str | None = None
    shared_experts_gate_pattern: str | None = None
    expert_w1: str | None = None
    expert_w2: str | None = None
    expert_w3: str | None = None
    num_experts_attr: str | None = None
    top_k_attr: str | None = None
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = None
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    score_apply: Literal["auto", "pre", "post"] = "auto"
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    top_k: str | int = "auto"
    routed_scaling_factor: str | float = "auto"
    route_norm: bool | None = None
    route_scale: float = 1.0
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    load_balance_coeff: float | None = None
    has_shared_experts: bool | None = None
    gate_up_impl: Literal["separate", "fused"] = "separate"
    comm_backend: Literal["comm", "deepep"] = "comm"
    comm_num_sm: int = 12
    comm_qp_margin: int = 4
    comm_max_tokens_per_rank: int = 0


@dataclass(frozen=True)
class ElasticitySection:
    """Change the number of processes during a training."""

    enabled: bool = False
    max_train_batch_size: int = 2000
    micro_batch_sizes: tuple[int, ...] = (2, 4, 6)
    min_gpus: int = 1
    max_gpus: int = 10000
    min_time: int = 0
    prefer_larger_batch: bool = True
    ignore_non_elastic_batch_info: bool = False
    version: float = 0.2
    num_gpus_per_node: int = 1
    model_parallel_size: int = 1
