"""Sections of optimizer, schedule, checkpoints and the engine.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. Renamed keys do not appear here: ``check.rename`` has moved their values already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ActivationCheckpointingSection",
    "CheckpointSection",
    "CheckpointWriterSection",
    "CompileSection",
    "DsHfCheckpointSection",
    "DsHfOffloadSection",
    "DsHfPipelineSection",
    "DsHfSection",
    "HybridEngineSection",
    "NebulaSection",
    "OptimizerSection",
    "ParallelWriteSection",
    "PipelineSection",
    "SchedulerSection",
    "SparseAttentionSection",
]


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer that the engine builds. Leave it out to pass your own optimizer (the Trainer passes its own)."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)
    legacy_fusion: bool = False
    torch_adam: bool = False


@dataclass(frozen=True)
class SchedulerSection:
    """The learning-rate schedule that the engine steps. Leave it out to use your own."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelWriteSection:
    """Write with more processes."""

    pipeline_stage: bool = False


@dataclass(frozen=True)
class CheckpointWriterSection:
    """DeepSpeed's fast writer."""

    type: Literal["FAST", "PYTHON", "MOCK"] = "FAST"
    io_buffer_size: int = 67_108_864
    io_buffer_double: bool = True
    show_statistics: bool = False
    data_parallel: Literal["REPLICA", "SOCKET", "MACHINE"] | None = None
    decoupled: bool = False
    io_multiplier: int = 1


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and loading."""

    tag_validation: Literal["Warn", "Ignore", "Fail"] = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWriteSection = field(default_factory=ParallelWriteSection)
    checkpoint_serialization: bool = True
    writer: CheckpointWriterSection | None = None


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """Where the inputs of checkpointed blocks lie. Whether a model of transformers checkpoints is its own setting."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


@dataclass(frozen=True)
class CompileSection:
    """DeepCompile: ZeRO's communication inside the compiled graph."""

    deepcompile: bool = False
    passes: tuple[str, ...] | None = None
    autoep_non_moe: bool = False
    free_activation: bool = False
    free_activation_threshold: int = 10_485_760
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    offload_parameters: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    debug_log: bool = False
    disable: bool = False
    backend: str = "inductor"


@dataclass(frozen=True)
class PipelineSection:
    """Settings of a deepspeed.pipe.PipelineModule."""

    stages: int | str = "auto"
    partition: str = "best"
    seed_layers: bool = False
    activation_checkpoint_interval: int = 0
    pipe_partitioned: bool = True
    grad_partitioned: bool = True
    use_reentrant: bool = True


@dataclass(frozen=True)
class DsHfPipelineSection:
    """How a PipelineModule is run."""

    chunks: int = 1
    check_batches: bool = True


@dataclass(frozen=True)
class DsHfCheckpointSection:
    """How checkpoints are written, and what is checked when one is read."""

    async_: bool = False
    verify: Literal["sizes", "digest", "full"] = "digest"
    grace: float | None = None


@dataclass(frozen=True)
class NebulaSection:
    """Azure's writer of checkpoints in the background, in whose place ds_hf's own is."""

    enabled: bool = False
    enable_nebula_load: bool = True
    nebula_load_path: str | None = None
    persistent_storage_path: str | None = None
    persistent_time_interval: int = 100
    num_of_version_in_retention: int = 2


@dataclass(frozen=True)
class DsHfOffloadSection:
    """Offload of optimizer states beyond what DeepSpeed's keys say."""

    ratio: float | Literal["auto"] | None = None
    stream: float | Literal["auto"] = "auto"
    delayed: bool = False


@dataclass(frozen=True)
class DsHfWireSection:
    """In how many bits gradients and parameters travel between processes."""

    gradients: Literal[16, 8, 4] | None = None
    parameters: Literal[16, 8] | None = None
    block: int = 256
    first_hop: int | Literal["auto"] = "auto"


@dataclass(frozen=True)
class DsHfFp8Section:
    """Linear layers that multiply in fp8."""

    enabled: bool = True
    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    exclude: tuple[str, ...] = ()
    smallest: int = 4194304
    keep_weights: bool | Literal["auto"] = "auto"
    emulate: bool = False


@dataclass(frozen=True)
class DsHfQatSection:
    """Linear layers that round as a file in few bits will (quantization-aware training)."""

    enabled: bool = True
    weights: Literal[4, 8] = 4
    activations: Literal[8] | None = None
    group_size: int | None = 32
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class DsHfSection:
    """Settings of ds_hf itself, unknown to DeepSpeed."""

    compat_schedules: Literal["deepspeed", "strict"] = "deepspeed"
    checkpoint: DsHfCheckpointSection = field(default_factory=DsHfCheckpointSection)
    compile: Literal["blocks"] | Literal[False] = False
    capture: Literal["blocks"] | Literal[False] = False
    capture_pad_to_multiple_of: int | None = None
    fp8: DsHfFp8Section | None = None
    qat: DsHfQatSection | None = None
    activation_memory_budget: float | None = None
    pipeline: DsHfPipelineSection = field(default_factory=DsHfPipelineSection)
    hang_timeout: float | None = None
    nonfinite: Literal["warn", "skip", "error"] | None = None
    offload: DsHfOffloadSection = field(default_factory=DsHfOffloadSection)
    join_blocks: bool = True
    peer_copies: bool = True
    sequence_gradients: Literal["mean", "sum"] = "mean"
    sparse_attention: bool | Literal["all"] = False
    split_masters: bool | Literal["auto"] = "auto"
    offload_activations: bool = False
    tiled_mlp: int | Literal["auto"] | None = None
    chunked_loss: bool | Literal["auto"] = "auto"
    fused_lora: bool = True
    tensor_sequence_parallel: bool = False
    report: str | None = None
    report_steps: Literal["sampled", "all"] = "sampled"
    stochastic_rounding: bool = True
    summary: Literal["line", "full"] | Literal[False] = "line"
    trl_workarounds: bool = False
    wire: DsHfWireSection = field(default_factory=DsHfWireSection)


@dataclass(frozen=True)
class HybridEngineSection:
    """How an engine that trains generates. Every engine has generate(); these keys change it."""

    enabled: bool = False
    max_out_tokens: int = 512
    inference_tp_size: int = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: int = 8
    enable_cuda_graph: bool = False


@dataclass(frozen=True)
class SparseAttentionSection:
    """DeepSpeed's block-sparse attention."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"] = "fixed"
    block: int = 16
    different_layout_per_head: bool = False
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1
    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    num_sliding_window_blocks: int = 3
