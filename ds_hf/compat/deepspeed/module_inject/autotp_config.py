"""``deepspeed.module_inject.autotp_config``: the rules of ``partition_config`` as objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ds_hf.engine.parallel.tensor.presets import PRESETS, preset_specs

__all__ = [
    "AutoTPConfig",
    "AutoTPPresets",
    "PartitionType",
    "TPLayerSpec",
    "merge_autotp_configs",
]


class PartitionType(Enum):
    """How a layer is divided."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """One rule, see ``tensor_parallel.partition_config.layer_specs``.

    Raises:
        ValueError: the shape cannot be one.
    """

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: tuple[Any, ...] | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.partition_type, str):
            self.partition_type = PartitionType(self.partition_type.lower())
        if self.shape is None:
            return
        self.shape = tuple(tuple(each) if isinstance(each, list) else each for each in self.shape)
        at = self.get_partition_dim()
        if not 0 <= at < len(self.shape):
            raise ValueError(f"AutoTP partition_dim {at} is out of range for shape length {len(self.shape)}.")
        for index, each in enumerate(self.shape):
            if isinstance(each, tuple):
                if index != at:
                    raise ValueError(f"AutoTP shape nested tuple only allowed at partition_dim={at}, got at {index}.")
                if not each or any(not isinstance(size, int) or size <= 0 for size in each):
                    raise ValueError("AutoTP nested sub-parameter sizes must be positive integers.")
            elif not isinstance(each, int) or each == 0 or each < -1:
                raise ValueError("AutoTP shape dimensions must be positive integers or -1.")

    def get_partition_dim(self) -> int:
        if self.partition_dim is not None:
            return self.partition_dim
        return 0 if self.partition_type is PartitionType.COLUMN else 1

    def has_unequal_sub_params(self) -> bool:
        return self.get_sub_param_sizes() is not None

    def get_sub_param_sizes(self) -> tuple[int, ...] | None:
        entry = self._entry()
        return entry if isinstance(entry, tuple) else None

    def get_num_sub_params(self) -> int | None:
        entry = self._entry()
        return len(entry) if isinstance(entry, tuple) else entry if isinstance(entry, int) and entry > 0 else None

    def _entry(self) -> Any:
        at = self.get_partition_dim()
        return self.shape[at] if self.shape is not None and at < len(self.shape) else None

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        if self.model_types and str(model_type).lower() not in [str(kind).lower() for kind in self.model_types]:
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """``tensor_parallel.partition_config``."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """The first rule that matches."""
        return next((spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Of the section of a file."""
        specs = [_spec(each) for each in config_dict.get("layer_specs", ())]
        return cls(layer_specs=specs, **{key: value for key, value in config_dict.items() if key != "layer_specs"})


def _spec(given: Mapping[str, Any]) -> TPLayerSpec:
    known = {key: value for key, value in given.items() if key in TPLayerSpec.__dataclass_fields__}
    return TPLayerSpec(**{"patterns": [], **known})


class AutoTPPresets:
    """``tensor_parallel.preset_model``."""

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """The rules for a family of models, ``None`` where there are none."""
        name = model_type.lower()
        return AutoTPConfig(layer_specs=[_spec(each) for each in preset_specs(name, None)]) if name in PRESETS else None


def _preset(name: str) -> Any:
    return staticmethod(lambda: AutoTPPresets.get_preset(name))


for _name in PRESETS:
    setattr(AutoTPPresets, _name, _preset(_name))


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """Both; the rules of ``override`` come first."""
    return AutoTPConfig(
        tp_size=override.tp_size if override.tp_size > 1 else base.tp_size,
        layer_specs=[*override.layer_specs, *base.layer_specs],
        embedding_partition_dim=override.embedding_partition_dim,
        lm_head_patterns=override.lm_head_patterns or base.lm_head_patterns,
        use_default_specs=override.use_default_specs,
        strict_mode=override.strict_mode,
    )
