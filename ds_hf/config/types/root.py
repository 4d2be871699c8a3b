"""The whole configuration as one frozen dataclass, and where each of its values came from.

``Config`` has the top-level keys of the JSON file as attributes; a key that the user left out has DeepSpeed's default.
The last fields, below a comment, are not keys: they tell how the configuration came about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from ds_hf.config.types.compression import CompressionTrainingSection
from ds_hf.config.types.data import CurriculumSection, DataEfficiencySection, ProgressiveLayerDropSection
from ds_hf.config.types.monitor import (
    AutotuningSection,
    CometSection,
    CommsLoggerSection,
    CsvMonitorSection,
    FlopsProfilerSection,
    TensorboardSection,
    TimersSection,
    WandbSection,
)
from ds_hf.config.types.parallel import (
    ElasticitySection,
    ExpertParallelSection,
    TensorParallelSection,
)
from ds_hf.config.types.precision import (
    AmpSection,
    BF16Section,
    DataTypesSection,
    FP16Section,
    TorchAutocastSection,
    WeightQuantizationSection,
)
from ds_hf.config.types.training import (
    ActivationCheckpointingSection,
    CheckpointSection,
    CompileSection,
    DsHfSection,
    HybridEngineSection,
    NebulaSection,
    OptimizerSection,
    PipelineSection,
    SchedulerSection,
    SparseAttentionSection,
)
from ds_hf.config.types.zero import (
    AioSection,
    ZeroSection,
)
from ds_hf.errors import Fault

__all__ = ["Config", "Origin", "OriginKind"]


class OriginKind(str, Enum):
    """How a value got into the configuration."""

    USER = "set"
    RENAMED = "renamed"
    DERIVED = "derived"
    AUTO = "auto"
    DEFAULT = "default"


AXES = ("pipe", "data", "sequence", "tensor")  # outer to inner: tensor-parallel processes have consecutive ranks


@dataclass(frozen=True)
class MeshShape:
    """How many processes there are along each axis.

    Attributes:
        pipe: stages of a pipeline.
        data: processes that read different samples.
        sequence: processes that share each sample.
        tensor: processes that share each layer.
        expert: processes that share the experts, a part of data x sequence.
        inner: processes over which hierarchical ZeRO divides states, a part of data x sequence; ``None`` for all.
    """

    pipe: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    inner: int | None = None

    @property
    def processes(self) -> int:
        """In all."""
        return self.pipe * self.data * self.sequence * self.tensor

    @property
    def model(self) -> int:
        """Processes that hold different parts of one model: pipe x tensor."""
        return self.pipe * self.tensor

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")


@dataclass(frozen=True)
class Origin:
    """Where one effective value came from.

    Attributes:
        kind: set by the user, moved from an older key, derived, left for the Trainer to fill, or the default.
        detail: the older key, what it was derived from, who fills it, or the second name by which the user set it.
        line: 1-based line in the source text, when there is one.
    """

    kind: OriginKind
    detail: str = ""
    line: int | None = None

    def _filler(self) -> str:
        if self.detail == "accelerate":
            return "filled by accelerate"
        return f"Trainer: {self.detail.removeprefix('TrainingArguments.')}"

    def __str__(self) -> str:
        at = f"line {self.line}" if self.line is not None else ""
        texts = {
            OriginKind.USER: at or "set",
            OriginKind.RENAMED: f"renamed from {self.detail}" + (f", {at}" if at else ""),
            OriginKind.DERIVED: f"derived from {self.detail}",
            OriginKind.AUTO: self._filler(),
            OriginKind.DEFAULT: "default",
        }
        return texts[self.kind]


@dataclass(frozen=True)
class Config:
    """A configuration that has passed every check."""

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    managed_gradient_accumulation: bool = True
    sequence_parallel_size: int = 1
    data_parallel_size: int | None = None
    dataloader_drop_last: bool = False
    vocabulary_size: int | None = None
    use_data_before_expert_parallelism: bool = False
    optimizer: OptimizerSection | None = None
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    scheduler: SchedulerSection | None = None
    gradient_clipping: float = 1.0
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    seq_parallel_communication_data_type: Literal["fp32", "fp16", "bf16"] | None = "fp32"
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    sparse_gradients: bool = False
    disable_allgather: bool = False
    comms_logger: CommsLoggerSection = field(default_factory=CommsLoggerSection)
    fp16: FP16Section = field(default_factory=FP16Section)
    bf16: BF16Section = field(default_factory=BF16Section)
    amp: AmpSection = field(default_factory=AmpSection)
    torch_autocast: TorchAutocastSection = field(default_factory=TorchAutocastSection)
    data_types: DataTypesSection = field(default_factory=DataTypesSection)
    zero_optimization: ZeroSection = field(default_factory=ZeroSection)
    aio: AioSection = field(default_factory=AioSection)
    activation_checkpointing: ActivationCheckpointingSection = field(default_factory=ActivationCheckpointingSection)
    compile: CompileSection = field(default_factory=CompileSection)
    graph_harvesting: bool = False
    tensor_parallel: TensorParallelSection = field(default_factory=TensorParallelSection)
    expert_parallel: ExpertParallelSection = field(default_factory=ExpertParallelSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    data_efficiency: DataEfficiencySection = field(default_factory=DataEfficiencySection)
    curriculum_learning: CurriculumSection = field(default_factory=CurriculumSection)
    progressive_layer_drop: ProgressiveLayerDropSection = field(default_factory=ProgressiveLayerDropSection)
    compression_training: CompressionTrainingSection = field(default_factory=CompressionTrainingSection)
    weight_quantization: WeightQuantizationSection = field(default_factory=WeightQuantizationSection)
    sparse_attention: SparseAttentionSection = field(default_factory=SparseAttentionSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    nebula: NebulaSection = field(default_factory=NebulaSection)
    elasticity: ElasticitySection = field(default_factory=ElasticitySection)
    autotuning: AutotuningSection = field(default_factory=AutotuningSection)
    steps_per_print: float | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = None
    flops_profiler: FlopsProfilerSection = field(default_factory=FlopsProfilerSection)
    timers: TimersSection = field(default_factory=TimersSection)
    tensorboard: TensorboardSection = field(default_factory=TensorboardSection)
    wandb: WandbSection = field(default_factory=WandbSection)
    comet: CometSection = field(default_factory=CometSection)
    csv_monitor: CsvMonitorSection = field(default_factory=CsvMonitorSection)
    hybrid_engine: HybridEngineSection = field(default_factory=HybridEngineSection)
    ds_hf: DsHfSection = field(default_factory=DsHfSection)
    # Not keys of the file:
    source: str = "config"
    mesh: MeshShape | None = None  # where the number of processes is known
    resolved: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    provenance: dict[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    warnings: tuple[Fault, ...] = field(default=(), compare=False, repr=False)

    def is_given(self, pointer: str) -> bool:
        """Whether the file, and neither a default nor a Trainer, says what is at ``pointer``."""
        origin = self.provenance.get(pointer)
        return origin is not None and origin.kind not in (OriginKind.DEFAULT, OriginKind.AUTO)
