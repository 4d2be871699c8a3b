"""``deepspeed.utils.comms_logging``."""

from ds_hf.engine.comm.comms_logger import CommsLogger, calc_bw_log, convert_size

__all__ = ["CommsLogger", "calc_bw_log", "convert_size"]
