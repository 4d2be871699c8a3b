"""``deepspeed.monitor``."""

from . import comet, config, csv_monitor, monitor, tensorboard, utils, wandb

__all__ = ["comet", "config", "csv_monitor", "monitor", "tensorboard", "utils", "wandb"]
