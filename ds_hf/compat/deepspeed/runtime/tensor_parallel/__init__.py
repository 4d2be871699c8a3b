"""``deepspeed.runtime.tensor_parallel``."""

from .config import AUTOTP_MODE, get_tensor_parallel_config
