"""Sections of number formats and loss scaling.

Frozen dataclasses with the keys, types and defaults of the JSON Schema; ``tests/config/test_types.py`` holds the two
together. Renamed keys do not appear here: ``check.rename`` has moved their values already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "AmpSection",
    "BF16Section",
    "DataTypesSection",
    "FP16Section",
    "TorchAutocastSection",
    "WeightQuantizationSection",
]


@dataclass(frozen=True)
class FP16Section:
    """Half precision with loss scaling. Excludes bf16."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    fp16_master_weights_and_grads: bool = False


@dataclass(frozen=True)
class BF16Section:
    """bfloat16 mixed precision with fp32 master weights. Excludes fp16."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


@dataclass(frozen=True)
class AmpSection:
    """apex automatic mixed precision, with apex's own keyword arguments."""

    enabled: bool = False
    opt_level: str = "O1"


@dataclass(frozen=True)
class TorchAutocastSection:
    """Run the model under torch.autocast with fp32 parameters."""

    enabled: bool = False
    dtype: Literal["fp16", "bf16", "fp32"] | None = None
    lower_precision_safe_modules: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DataTypesSection:
    """Number formats of single roles."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    param_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    buffer_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    keep_in_fp32_modules: str | tuple[str, ...] = "auto"


@dataclass(frozen=True)
class WeightQuantizationSection:
    """Quantize weights when the model is built."""

    enabled: bool = True
    num_bits: int = 8
    q_type: str = "symmetric"
    q_groups: int = 1
    quantized_initialization: dict[str, Any] = field(default_factory=dict)
    post_init_quant: dict[str, Any] = field(default_factory=dict)
