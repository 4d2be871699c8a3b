"""The sections of the monitors under the names of ``deepspeed.monitor.config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds_hf.config.load import load_config
from ds_hf.config.types import CometSection, Config, CsvMonitorSection, TensorboardSection, WandbSection

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """The sections of the monitors."""

    tensorboard: TensorboardSection = field(default_factory=TensorboardSection)
    comet: CometSection = field(default_factory=CometSection)
    wandb: WandbSection = field(default_factory=WandbSection)
    csv_monitor: CsvMonitorSection = field(default_factory=CsvMonitorSection)

    @property
    def enabled(self) -> bool:
        """One of them is on."""
        return any(section.enabled for section in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))

    @classmethod
    def of(cls, settings: Config) -> DeepSpeedMonitorConfig:
        """Those of a whole configuration."""
        return cls(settings.tensorboard, settings.comet, settings.wandb, settings.csv_monitor)


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of the monitors in the plain dict of a configuration, of which nothing else is read.

    Raises:
        ConfigError: a setting of theirs is wrong.
    """
    sections = {key: param_dict[key] for key in ("tensorboard", "comet", "wandb", "csv_monitor") if key in param_dict}
    return DeepSpeedMonitorConfig.of(load_config(sections, check_batch=False))
