"""``deepspeed.moe``: what scripts import for models that may have experts; those that have none train."""

from . import utils

__all__ = ["utils"]
