"""``deepspeed.compression``."""

from . import basic_layer, compress, helper, scheduler, utils
from .compress import init_compression, redundancy_clean
from .scheduler import compression_scheduler

__all__ = [
    "basic_layer",
    "compress",
    "compression_scheduler",
    "helper",
    "init_compression",
    "redundancy_clean",
    "scheduler",
    "utils",
]
