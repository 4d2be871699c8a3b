"""``deepspeed.DeepSpeedConfig``: a checked configuration under the attribute names that DeepSpeed's scripts read."""

from __future__ import annotations

import os
from enum import Enum, IntEnum
from typing import Any

from ds_hf.config.load import load_config
from ds_hf.config.types.root import Config

__all__ = ["DeepSpeedConfig", "OffloadDeviceEnum", "ZeroStageEnum"]


class ZeroStageEnum(IntEnum):
    """The stages by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Where states may be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class DeepSpeedConfig:
    """Reads a configuration (path, dict, JSON text, ...) as ``initialize`` does.

    Attributes that ds_hf has under the JSON's own names (``train_batch_size``, ``gradient_clipping``,
    ``communication_data_type``, ...) are those of ``settings``.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        world_size = int(os.environ.get("WORLD_SIZE") or 1) if mpu is None else mpu.get_data_parallel_world_size()
        self.world_size: int = world_size
        self.settings: Config = load_config(config, world_size=world_size)

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings")
        if settings is None or not hasattr(settings, name):
            raise AttributeError(
                f"DeepSpeedConfig of ds_hf has no attribute {name!r}; settings has {_fields(settings)}"
            )
        return getattr(settings, name)

    @property
    def _param_dict(self) -> dict[str, Any]:
        return self.settings.resolved

    @property
    def zero_config(self) -> Any:
        """The section ``zero_optimization``."""
        return self.settings.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    @property
    def zero_enabled(self) -> bool:
        return self.settings.zero_optimization.stage > 0

    @property
    def float16_config(self) -> Any:
        """The section ``fp16``."""
        return self.settings.fp16

    @property
    def bfloat16_config(self) -> Any:
        """The section ``bf16``."""
        return self.settings.bf16

    @property
    def float16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    fp16_enabled = float16_enabled

    @property
    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    @property
    def optimizer_name(self) -> str | None:
        return None if self.settings.optimizer is None else self.settings.optimizer.type.lower()

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        return None if self.settings.optimizer is None else dict(self.settings.optimizer.params)

    @property
    def scheduler_name(self) -> str | None:
        return None if self.settings.scheduler is None else self.settings.scheduler.type

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        return None if self.settings.scheduler is None else dict(self.settings.scheduler.params)

    @property
    def activation_checkpointing_config(self) -> Any:
        """The section ``activation_checkpointing``."""
        return self.settings.activation_checkpointing

    def print_user_config(self) -> str:
        """The configuration as JSON text."""
        import json

        return json.dumps(self.settings.resolved, indent=4, sort_keys=True)


def _fields(settings: Any) -> str:
    return ", ".join(sorted(vars(settings))) if settings is not None else "nothing yet"
