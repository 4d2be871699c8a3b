"""``deepspeed.runtime.fp16.loss_scaler``."""

from ds_hf.engine.optim.loss_scaler import DynamicLossScaler
from ds_hf.engine.optim.loss_scaler import StaticLossScaler as LossScaler
from ds_hf.engine.optim.loss_scaler import create_loss_scaler as CreateLossScaler

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "DELAYED_SHIFT",
    "INITIAL_LOSS_SCALE",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
    "CreateLossScaler",
    "DynamicLossScaler",
    "LossScaler",
]

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"
