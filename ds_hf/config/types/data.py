"""Sections of data efficiency: curricula, sampling, dropped tokens and layers.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. A metric of ``curriculum_metrics`` stays a dict, which the schema has checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "CurriculumLearningSection",
    "CurriculumSection",
    "DataEfficiencySection",
    "DataRoutingSection",
    "DataSamplingSection",
    "DynamicBatchingSection",
    "LayerTokenLrScheduleSection",
    "ProgressiveLayerDropSection",
    "RandomLtdScheduleSection",
    "RandomLtdSection",
]


@dataclass(frozen=True)
class CurriculumLearningSection:
    """Samples from easy to hard."""

    enabled: bool = False
    data_cluster_path: str | None = None
    curriculum_metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DynamicBatchingSection:
    """Batches by token count."""

    enabled: bool = False
    metrics_path: str | None = None
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    min_batch_size: int = 1
    max_batch_size: int | None = None
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    max_tokens: int | None = None
    verbose: bool = False


@dataclass(frozen=True)
class DataSamplingSection:
    """Which samples come when."""

    enabled: bool = False
    num_epochs: int = 1000
    num_workers: int = 0
    pin_memory: bool = False
    curriculum_learning: CurriculumLearningSection = field(default_factory=CurriculumLearningSection)
    dynamic_batching: DynamicBatchingSection = field(default_factory=DynamicBatchingSection)


@dataclass(frozen=True)
class RandomLtdScheduleSection:
    """Growth of the sequence."""

    min_value: int | None = None
    max_value: int | None = None
    schedule_type: str | None = None
    schedule_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerTokenLrScheduleSection:
    """Learning rate by tokens."""

    enabled: bool = False
    total_layer_tokens: int | None = None
    warmup_type: str | None = None
    warmup_layer_tokens: int | None = None


@dataclass(frozen=True)
class RandomLtdSection:
    """Random layer-token dropping."""

    enabled: bool = False
    total_layer_num: int | None = None
    random_ltd_layer_num: int | None = None
    random_ltd_layer_id: tuple[int, ...] = ()
    model_mask_name: str | None = None
    model_type: str | None = None
    hidden_state_order: str | None = None
    random_ltd_schedule: RandomLtdScheduleSection = field(default_factory=RandomLtdScheduleSection)
    layer_token_lr_schedule: LayerTokenLrScheduleSection = field(default_factory=LayerTokenLrScheduleSection)
    micro_batch_size: int | None = None
    global_batch_size: int | None = None


@dataclass(frozen=True)
class DataRoutingSection:
    """Which tokens go through which layers."""

    enabled: bool = False
    random_ltd: RandomLtdSection = field(default_factory=RandomLtdSection)


@dataclass(frozen=True)
class DataEfficiencySection:
    """Curriculum learning, dynamic batches and random layer-token dropping."""

    enabled: bool = False
    seed: int = 1234
    data_sampling: DataSamplingSection = field(default_factory=DataSamplingSection)
    data_routing: DataRoutingSection = field(default_factory=DataRoutingSection)

    @property
    def batches_by_tokens(self) -> bool:
        """Whether batches have a budget of tokens."""
        return self.enabled and self.data_sampling.enabled and self.data_sampling.dynamic_batching.enabled

    @property
    def samples_by_metrics(self) -> bool:
        """Whether metrics choose the samples of a batch."""
        sampling = self.data_sampling
        if not (self.enabled and sampling.enabled and sampling.curriculum_learning.enabled):
            return False
        metrics = sampling.curriculum_learning.curriculum_metrics
        return any(not cuts_length(name, metric) for name, metric in metrics.items())

    @property
    def length_curriculum(self) -> tuple[str, dict[str, Any]] | None:
        """Name and settings of the metric that is a length to which batches are cut, if there is one that acts."""
        sampling = self.data_sampling
        if not (self.enabled and sampling.enabled and sampling.curriculum_learning.enabled):
            return None
        metrics = sampling.curriculum_learning.curriculum_metrics
        return next(((name, metric) for name, metric in metrics.items() if cuts_length(name, metric)), None)


@dataclass(frozen=True)
class CurriculumSection:
    """Older curriculum learning by sequence length."""

    enabled: bool = False
    curriculum_type: str = "seqlen"
    min_difficulty: int | None = None
    max_difficulty: int | None = None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    schedule_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgressiveLayerDropSection:
    """Drop layers progressively during training."""

    enabled: bool = False
    theta: float = 1.0
    gamma: float = 0.001


def cuts_length(name: str, metric: dict[str, Any]) -> bool:
    """Whether a metric is a length of sequences, which says how long they are and not which are taken."""
    sampled = metric.get("clustering_type", "single_cluster") != "single_cluster" or "index_to_metric_path" in metric
    return name in ("seqlen", "seqlen_truncate") and not sampled
