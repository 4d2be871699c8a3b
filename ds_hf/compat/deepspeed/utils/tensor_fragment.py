"""``deepspeed.utils.tensor_fragment``: whole values of sharded states."""

from ds_hf.engine.zero.access import *  # noqa: F403
from ds_hf.engine.zero.access import __all__ as __all__
