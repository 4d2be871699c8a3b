"""``deepspeed.DeepSpeedConfig``: a checked configuration under the attribute names that DeepSpeed's scripts read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from ds_hf.config.load import load_config
from ds_hf.config.types.precision import BF16Section, FP16Section
from ds_hf.config.types.root import Config
from ds_hf.deepspeed_api.monitor_config import DeepSpeedMonitorConfig
from ds_hf.dtypes import torch_dtype
from ds_hf.errors import ConfigError

__all__ = [
    "DeepSpeedBF16Config",
    "DeepSpeedConfig",
    "DeepSpeedFP16Config",
    "DeepSpeedZeroConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroStageEnum",
    "get_bfloat16_config",
    "get_float16_config",
]


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


class OffloadStateTypeEnum(str, Enum):
    """What ``engine.offload_states`` may take off the device."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedConfig:
    """Reads a configuration (path, dict, JSON text, ...) as ``initialize`` does.

    Attributes that ds_hf has under the JSON's own names (``train_batch_size``, ``gradient_clipping``,
    ``communication_data_type``, ...) are those of ``settings``.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        world_size = int(os.environ.get("WORLD_SIZE") or 1) if mpu is None else mpu.get_data_parallel_world_size()
        if mesh_device is not None:
            world_size = mesh_device["data_parallel"].size()
        self.world_size: int = world_size
        self.settings: Config = load_config(config, world_size=world_size)

    @classmethod
    def of(cls, settings: Config, world_size: int) -> DeepSpeedConfig:
        """The view of a configuration that has been read already."""
        view = cls.__new__(cls)
        view.world_size, view.settings = world_size, settings
        return view

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings")
        if settings is not None and not hasattr(settings, name) and name in settings.resolved:
            return settings.resolved[name]  # a section that ds_hf does not act upon
        if settings is None or not hasattr(settings, name):
            raise AttributeError(
                f"DeepSpeedConfig of ds_hf has no attribute {name!r}; settings has {_fields(settings)}"
            )
        return getattr(settings, name)

    @property
    def _param_dict(self) -> dict[str, Any]:
        return self.settings.resolved

    @property
    def zero_config(self) -> DeepSpeedZeroConfig:
        """The section ``zero_optimization``."""
        return DeepSpeedZeroConfig.of(self.settings)

    @property
    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    @property
    def zero_enabled(self) -> bool:
        return self.settings.zero_optimization.stage > 0

    @property
    def overlaps_communication(self) -> bool:
        """``overlap_comm``, whose default depends on the stage."""
        zero = self.settings.zero_optimization
        return zero.stage == ZeroStageEnum.weights if zero.overlap_comm is None else zero.overlap_comm

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
    def param_dtype(self) -> torch.dtype | None:
        """``data_types.param_dtype``, ``None`` where the file leaves it open."""
        found: torch.dtype | None = torch_dtype(self.settings.data_types.param_dtype)
        return found

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """``data_types.buffer_dtype``, ``None`` where the file leaves it open."""
        found: torch.dtype | None = torch_dtype(self.settings.data_types.buffer_dtype)
        return found

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

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The sections of the monitors."""
        return DeepSpeedMonitorConfig.of(self.settings)

    def print_user_config(self) -> str:
        """The configuration as JSON text."""
        import json

        return json.dumps(self.settings.resolved, indent=4, sort_keys=True)


class DeepSpeedZeroConfig:
    """The section ``zero_optimization`` alone, checked; settings go by their names of the JSON, with and without
    ``stage3_``.

    Args:
        strict: "auto" is refused; otherwise it counts as absent.

    Raises:
        ConfigError: a setting is wrong; it is a ``ValueError``. pydantic's ``ValidationError`` where that is imported.
    """

    def __init__(self, strict: bool = False, **values: Any) -> None:
        given = {key: value for key, value in values.items() if value is not None}
        whole = {"train_batch_size": 1, "zero_optimization": {"stage": 3, **given}}  # a stage that may have anything
        with _as_of_pydantic("zero_optimization"):
            settings = load_config(whole, allow_auto=not strict, check_batch=False)
        section = replace(settings.zero_optimization, stage=given.get("stage", 0))
        self.settings = replace(settings, zero_optimization=section)

    @classmethod
    def of(cls, settings: Config) -> DeepSpeedZeroConfig:
        """The section of a configuration that has been read already."""
        view = cls.__new__(cls)
        view.settings = settings
        return view

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings")
        section = None if settings is None else settings.zero_optimization
        for full in (name, f"stage3_{name}"):
            if hasattr(section, full):
                return getattr(section, full)
        raise AttributeError(f"zero_optimization has no setting {name!r}; it has {_fields(section)}")

    @property
    def overlap_comm(self) -> bool:
        """Its default depends on the stage."""
        return DeepSpeedConfig.of(self.settings, 1).overlaps_communication

    @property
    def offload_param(self) -> Any:
        """The section, ``None`` where there is none."""
        return self._section("offload_param")

    @property
    def offload_optimizer(self) -> Any:
        """The section, ``None`` where there is none."""
        return self._section("offload_optimizer")

    @property
    def leaf_module(self) -> SimpleNamespace:
        """Modules that are gathered as a whole: lists ``classes``, ``names``, ``name_suffixes``."""
        return SimpleNamespace(
            **{key: list(value) for key, value in asdict(self.settings.zero_optimization.leaf_module).items()}
        )

    def _section(self, name: str) -> Any:
        there = name in self.settings.resolved.get("zero_optimization", {})
        return getattr(self.settings.zero_optimization, name) if there else None


class DeepSpeedFP16Config(FP16Section):
    """The section ``fp16`` alone, checked; ``strict`` refuses "auto", which otherwise counts as absent.

    Raises:
        ConfigError: a setting is wrong; it is a ``ValueError``. pydantic's ``ValidationError`` where that is imported.
    """

    def __init__(self, strict: bool = False, **values: Any) -> None:
        super().__init__(**asdict(_checked("fp16", values, strict).fp16))

    def initial_dynamic_scale(self) -> float:
        """The scale that dynamic scaling starts with."""
        return 2.0**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The arguments of DeepSpeed's dynamic scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(BF16Section):
    """The section ``bf16`` alone, checked; ``strict`` refuses "auto", which otherwise counts as absent.

    Raises:
        ConfigError: a setting is wrong; it is a ``ValueError``. pydantic's ``ValidationError`` where that is imported.
    """

    def __init__(self, strict: bool = False, **values: Any) -> None:
        super().__init__(**asdict(_checked("bf16", values, strict).bf16))


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """The section ``fp16`` of a whole configuration; defaults where there is none."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` (or ``bfloat16``, its older name); defaults where there is none."""
    section = param_dict.get("bf16")
    return DeepSpeedBF16Config(**(param_dict.get("bfloat16", {}) if section is None else section))


def _checked(name: str, values: dict[str, Any], strict: bool) -> Config:
    whole = {"zero_optimization": {"stage": 2}, name: values}  # a stage that may have anything
    with _as_of_pydantic(name):
        return load_config(whole, allow_auto=not strict, check_batch=False)


@contextmanager
def _as_of_pydantic(section: str) -> Iterator[None]:
    """Where a script has pydantic, it catches that one's error of a section, since DeepSpeed's are models of it."""
    try:
        yield
    except ConfigError as error:
        core: Any = sys.modules.get("pydantic_core")
        if core is None:
            raise
        told = [core.PydanticCustomError("ds_hf", "{fault}", {"fault": str(fault)}) for fault in error.faults]
        wrong = [{"type": one, "loc": (section,), "input": None} for one in told]
        raise core.ValidationError.from_exception_data(section, wrong) from error


def _fields(settings: Any) -> str:
    return ", ".join(sorted(vars(settings))) if settings is not None else "nothing yet"
