"""``deepspeed.checkpoint.constants``: keys and names of files in checkpoints."""

from ds_hf.deepspeed_api.checkpoint.constants import *  # noqa: F403
from ds_hf.deepspeed_api.checkpoint.constants import __all__ as __all__
