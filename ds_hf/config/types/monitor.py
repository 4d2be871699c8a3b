"""Sections of logging, profiling and tuning.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. Renamed keys do not appear here: ``check.rename`` has moved their values already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "AutotuningSection",
    "CometSection",
    "CommsLoggerSection",
    "CsvMonitorSection",
    "FlopsProfilerSection",
    "ModelInfoSection",
    "TensorboardSection",
    "ThroughputTimerSection",
    "TimersSection",
    "WandbSection",
]


@dataclass(frozen=True)
class CommsLoggerSection:
    """Log every collective with its size and time."""

    enabled: bool = False
    verbose: bool = False
    debug: bool = False
    prof_all: bool = True
    prof_ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlopsProfilerSection:
    """Count operations and time modules."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


@dataclass(frozen=True)
class ThroughputTimerSection:
    """Samples in a second."""

    enabled: bool = True
    synchronized: bool = True


@dataclass(frozen=True)
class TimersSection:
    """Timers of the engine."""

    throughput: ThroughputTimerSection = field(default_factory=ThroughputTimerSection)


@dataclass(frozen=True)
class TensorboardSection:
    """Write loss, learning rate and loss scale of each step for TensorBoard; needs the package tensorboard."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True)
class WandbSection:
    """Send loss, learning rate and loss scale of each step to Weights & Biases; needs the package wandb."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True)
class CometSection:
    """Send loss, learning rate and loss scale to Comet; needs the package comet_ml."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclass(frozen=True)
class CsvMonitorSection:
    """Write loss, learning rate and loss scale of each step into a CSV file each."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True)
class ModelInfoSection:
    """Facts about the model."""

    profile: bool = False
    num_params: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True)
class AutotuningSection:
    """DeepSpeed's autotuner."""

    enabled: bool = False
    fast: bool = True
    results_dir: str = "autotuning_results"
    exps_dir: str = "autotuning_exps"
    overwrite: bool = True
    start_profile_step: int = 3
    end_profile_step: int = 5
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    metric_path: str | None = None
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    tuner_early_stopping: int = 5
    tuner_num_trials: int = 50
    arg_mappings: dict[str, Any] | None = None
    max_train_batch_size: int | None = None
    min_train_batch_size: int = 1
    max_train_micro_batch_size_per_gpu: int = 1024
    min_train_micro_batch_size_per_gpu: int = 1
    num_tuning_micro_batch_sizes: int = 3
    mp_size: int = 1
    model_info: ModelInfoSection | None = None
    model_info_path: str | None = None
