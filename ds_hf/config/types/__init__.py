"""Frozen dataclasses of the configuration, one a section of the JSON file, with the same key names."""

from __future__ import annotations

from ds_hf.config.types.monitor import CometSection, CsvMonitorSection, TensorboardSection, WandbSection
from ds_hf.config.types.precision import DataTypesSection
from ds_hf.config.types.root import Config, OriginKind
from ds_hf.config.types.training import HybridEngineSection, OptimizerSection, SparseAttentionSection

__all__ = [
    "CometSection",
    "Config",
    "CsvMonitorSection",
    "DataTypesSection",
    "HybridEngineSection",
    "OptimizerSection",
    "OriginKind",
    "SparseAttentionSection",
    "TensorboardSection",
    "WandbSection",
]
