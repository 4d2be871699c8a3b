"""``deepspeed.runtime.zenflow``."""

from . import zenflow_config

__all__ = ["zenflow_config"]
