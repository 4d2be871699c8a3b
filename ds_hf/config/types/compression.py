"""Sections of compression and sparse attention.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. Renamed keys do not appear here: ``resolve.py`` has moved their values already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ActivationQuantizationSection",
    "ActivationQuantizationSharedSection",
    "ChannelPruningSection",
    "ChannelPruningSharedSection",
    "CompressionTrainingSection",
    "EigenvalueSection",
    "Fp16MixedQuantizeSection",
    "HeadPruningSection",
    "HeadPruningSharedSection",
    "LayerReductionSection",
    "QuantizeTrainingSection",
    "RowPruningSection",
    "RowPruningSharedSection",
    "SparseAttentionSection",
    "SparsePruningSection",
    "SparsePruningSharedSection",
    "WeightCompressionSection",
    "WeightQuantizationSection",
    "WeightQuantizationSharedSection",
]


@dataclass(frozen=True)
class LayerReductionSection:
    """Keep some layers of a teacher."""

    enabled: bool = False
    keep_number_layer: int | None = None
    module_name_prefix: str | None = None
    teacher_layer: tuple[int, ...] = ()
    other_module_name: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fp16MixedQuantizeSection:
    """Mix with fp16."""

    enabled: bool = False
    quantize_change_ratio: float = 0.001


@dataclass(frozen=True)
class WeightQuantizationSharedSection:
    """For all groups."""

    enabled: bool = False
    quantizer_kernel: bool = False
    schedule_offset: int = 0
    quantize_groups: int = 1
    quantize_verbose: bool = False
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    quantize_weight_in_forward: bool = False
    fp16_mixed_quantize: Fp16MixedQuantizeSection = field(default_factory=Fp16MixedQuantizeSection)


@dataclass(frozen=True)
class WeightCompressionSection:
    """Quantization-aware training of weights."""

    shared_parameters: WeightQuantizationSharedSection = field(default_factory=WeightQuantizationSharedSection)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivationQuantizationSharedSection:
    """For all groups."""

    enabled: bool = False
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    range_calibration: Literal["dynamic", "static"] = "dynamic"
    schedule_offset: int = 1000


@dataclass(frozen=True)
class ActivationQuantizationSection:
    """Quantization-aware training of activations."""

    shared_parameters: ActivationQuantizationSharedSection = field(default_factory=ActivationQuantizationSharedSection)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SparsePruningSharedSection:
    """For all groups."""

    enabled: bool = False
    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    schedule_offset: int = 1000
    schedule_offset_end: int = 1000
    schedule_offset_stride: int = 1
    block_pattern: str = "4x1"
    dense_ratio: float = 0.1
    excluded_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class SparsePruningSection:
    """Prune single weights."""

    shared_parameters: SparsePruningSharedSection = field(default_factory=SparsePruningSharedSection)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RowPruningSharedSection:
    """For all groups."""

    enabled: bool = False
    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    schedule_offset: int = 1000


@dataclass(frozen=True)
class RowPruningSection:
    """Prune rows."""

    shared_parameters: RowPruningSharedSection = field(default_factory=RowPruningSharedSection)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChannelPruningSharedSection:
    """For all groups."""

    enabled: bool = False
    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    schedule_offset: int = 1000


@dataclass(frozen=True)
class ChannelPruningSection:
    """Prune channels."""

    shared_parameters: ChannelPruningSharedSection = field(default_factory=ChannelPruningSharedSection)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadPruningSharedSection:
    """For all groups."""

    enabled: bool = False
    method: Literal["l1", "topk", "snip_momentum"] = "topk"
    schedule_offset: int = 1000
    num_heads: int | None = None


@dataclass(frozen=True)
class HeadPruningSection:
    """Prune attention heads."""

    shared_parameters: HeadPruningSharedSection = field(default_factory=HeadPruningSharedSection)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompressionTrainingSection:
    """Compression during training."""

    layer_reduction: LayerReductionSection = field(default_factory=LayerReductionSection)
    weight_quantization: WeightCompressionSection = field(default_factory=WeightCompressionSection)
    activation_quantization: ActivationQuantizationSection = field(default_factory=ActivationQuantizationSection)
    sparse_pruning: SparsePruningSection = field(default_factory=SparsePruningSection)
    row_pruning: RowPruningSection = field(default_factory=RowPruningSection)
    channel_pruning: ChannelPruningSection = field(default_factory=ChannelPruningSection)
    head_pruning: HeadPruningSection = field(default_factory=HeadPruningSection)


@dataclass(frozen=True)
class QuantizeTrainingSection:
    """Mixture of quantization, DeepSpeed's older scheme."""

    enabled: bool = False


@dataclass(frozen=True)
class EigenvalueSection:
    """Eigenvalues for mixture of quantization."""

    enabled: bool = False
    verbose: bool = False
    max_iter: int = 100
    tol: float = 0.01
    stability: float = 1e-06
    gas_boundary_resolution: int = 1
    layer_name: str = "bert.encoder.layer"
    layer_num: int = 0


@dataclass(frozen=True)
class WeightQuantizationSection:
    """Quantize weights when the model is built."""

    enabled: bool = True
    num_bits: int = 8
    q_type: str = "symmetric"
    q_groups: int = 1
    quantized_initialization: dict[str, Any] = field(default_factory=dict)
    post_init_quant: dict[str, Any] = field(default_factory=dict)


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
