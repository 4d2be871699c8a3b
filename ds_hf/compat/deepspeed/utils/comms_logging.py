"""``deepspeed.utils.comms_logging``."""

from __future__ import annotations

from ds_hf.engine.comm.comms_logger import CommsLogger, calc_bw_log, convert_size

from .._missing import missing

__all__ = ["CommsLogger", "calc_bw_log", "convert_size"]
__getattr__ = missing(__name__)
