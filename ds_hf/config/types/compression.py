"""Sections of ``compression_training``: quantized weights and activations, pruning, and students of fewer layers.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. The groups of a method stay dicts, which the schema has checked: their names are the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ActivationQuantizationSection",
    "ChannelPruningSection",
    "CompressionTrainingSection",
    "HeadPruningSection",
    "LayerReductionSection",
    "QuantizedWeightsSection",
    "RowPruningSection",
    "SparsePruningSection",
]

Method = Literal["l1", "topk", "snip_momentum"]
Range = Literal["symmetric", "asymmetric"]


@dataclass(frozen=True)
class LayerReductionSection:
    """Keep some layers of a teacher."""

    enabled: bool = False
    keep_number_layer: int | None = None
    module_name_prefix: str | None = None
    teacher_layer: tuple[int, ...] = ()
    other_module_name: tuple[str, ...] = ()


@dataclass(frozen=True)
class MixedQuantizeSection:
    """Weights that pass into their quantized values little by little."""

    enabled: bool = False
    quantize_change_ratio: float = 0.001


@dataclass(frozen=True)
class QuantizedWeightsShared:
    """What all groups of quantized weights have in common."""

    enabled: bool = False
    quantizer_kernel: bool = False
    schedule_offset: int = 0
    quantize_groups: int = 1
    quantize_verbose: bool = False
    quantization_type: Range = "symmetric"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    quantize_weight_in_forward: bool = False
    fp16_mixed_quantize: MixedQuantizeSection = field(default_factory=MixedQuantizeSection)


@dataclass(frozen=True)
class QuantizedWeightsSection:
    """Quantization-aware training of weights."""

    shared_parameters: QuantizedWeightsShared = field(default_factory=QuantizedWeightsShared)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivationQuantizationShared:
    """What all groups of quantized activations have in common."""

    enabled: bool = False
    quantization_type: Range = "symmetric"
    range_calibration: Literal["dynamic", "static"] = "dynamic"
    schedule_offset: int = 1000


@dataclass(frozen=True)
class ActivationQuantizationSection:
    """Quantization-aware training of activations."""

    shared_parameters: ActivationQuantizationShared = field(default_factory=ActivationQuantizationShared)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SparsePruningShared:
    """What all groups of pruned weights have in common."""

    enabled: bool = False
    method: Method = "l1"
    schedule_offset: int = 1000
    schedule_offset_end: int | None = None
    schedule_offset_stride: int = 1
    block_pattern: str | None = None
    dense_ratio: float | None = None
    excluded_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class SparsePruningSection:
    """Prune single weights."""

    shared_parameters: SparsePruningShared = field(default_factory=SparsePruningShared)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PruningShared:
    """What all groups of pruned rows, or channels, have in common."""

    enabled: bool = False
    method: Method = "l1"
    schedule_offset: int = 1000


@dataclass(frozen=True)
class RowPruningSection:
    """Prune rows."""

    shared_parameters: PruningShared = field(default_factory=PruningShared)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadPruningShared:
    """What all groups of pruned heads have in common."""

    enabled: bool = False
    method: Method = "topk"
    schedule_offset: int = 1000
    num_heads: int | None = None


@dataclass(frozen=True)
class HeadPruningSection:
    """Prune attention heads."""

    shared_parameters: HeadPruningShared = field(default_factory=HeadPruningShared)
    different_groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChannelPruningSection:
    """Prune channels of convolutions."""

    shared_parameters: PruningShared = field(default_factory=PruningShared)
    different_groups: dict[str, Any] = field(default_factory=dict)


Section = (
    QuantizedWeightsSection
    | ActivationQuantizationSection
    | SparsePruningSection
    | RowPruningSection
    | HeadPruningSection
    | ChannelPruningSection
)
# In the order in which a layer applies them.
METHODS = (
    *("weight_quantization", "activation_quantization", "sparse_pruning"),
    *("row_pruning", "head_pruning", "channel_pruning"),
)


@dataclass(frozen=True)
class CompressionTrainingSection:
    """Compression during training."""

    layer_reduction: LayerReductionSection = field(default_factory=LayerReductionSection)
    weight_quantization: QuantizedWeightsSection = field(default_factory=QuantizedWeightsSection)
    activation_quantization: ActivationQuantizationSection = field(default_factory=ActivationQuantizationSection)
    sparse_pruning: SparsePruningSection = field(default_factory=SparsePruningSection)
    row_pruning: RowPruningSection = field(default_factory=RowPruningSection)
    channel_pruning: ChannelPruningSection = field(default_factory=ChannelPruningSection)
    head_pruning: HeadPruningSection = field(default_factory=HeadPruningSection)

    @property
    def acts(self) -> bool:
        """Whether something in it is enabled."""
        return self.layer_reduction.enabled or any(True for _ in self.methods())

    def methods(self) -> Iterator[tuple[str, Section]]:
        """Name and section of each method that is enabled, in the order in which a layer applies them."""
        for name in METHODS:
            section: Section = getattr(self, name)
            if section.shared_parameters.enabled:
                yield name, section

    @property
    def trains_scores(self) -> bool:
        """Whether a method adds scores to the model, which the optimizer trains."""
        return any(getattr(section.shared_parameters, "method", None) == "topk" for _, section in self.methods())


def pattern_of(section: SparsePruningSection) -> tuple[int, int] | None:
    """(kept, of so many): of ``"2:4"`` 2 of each 4 consecutive inputs; ``None`` for weights one by one."""
    given = section.shared_parameters.block_pattern
    kept, colon, size = (given or "").partition(":")
    return (int(kept), int(size)) if colon and kept.isdecimal() and size.isdecimal() else None


def ratio_of(section: Section, group: Mapping[str, Any]) -> float:
    """The share of weights, rows, heads or channels that ``group`` of ``section`` keeps."""
    if isinstance(section, SparsePruningSection):
        pattern = pattern_of(section)
        if pattern is not None:
            return pattern[0] / pattern[1]
        shared = section.shared_parameters.dense_ratio
        return float(group.get("params", {}).get("dense_ratio", 0.5 if shared is None else shared))
    return float(group.get("params", {}).get("dense_ratio", 0.5))
