"""``deepspeed.monitor.config``."""

from ds_hf.deepspeed_api.monitor_config import DeepSpeedMonitorConfig, get_monitor_config
from ds_hf.config.types import CometSection as CometConfig
from ds_hf.config.types import CsvMonitorSection as CSVConfig
from ds_hf.config.types import TensorboardSection as TensorBoardConfig
from ds_hf.config.types import WandbSection as WandbConfig

__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]
