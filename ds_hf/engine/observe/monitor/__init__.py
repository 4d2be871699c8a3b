"""Where an engine writes loss and learning rate while it trains: CSV files, TensorBoard, Weights & Biases, Comet.

``base`` says what a monitor is; ``csv_files``, ``tensorboard``, ``wandb`` and ``comet`` are one each, with the keys of
their sections of the configuration; ``master`` owns those that are on; ``feed`` tells them of each step. Only the
process of global rank 0 opens or writes anything.
"""

from ds_hf.engine.observe.monitor.base import Event, Monitor
from ds_hf.engine.observe.monitor.comet import CometMonitor
from ds_hf.engine.observe.monitor.csv_files import CsvMonitor
from ds_hf.engine.observe.monitor.master import MonitorMaster, open_monitors
from ds_hf.engine.observe.monitor.tensorboard import TensorBoardMonitor
from ds_hf.engine.observe.monitor.wandb import WandbMonitor

__all__ = [
    "CometMonitor",
    "CsvMonitor",
    "Event",
    "Monitor",
    "MonitorMaster",
    "TensorBoardMonitor",
    "WandbMonitor",
    "open_monitors",
]
