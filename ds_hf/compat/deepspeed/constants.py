"""``deepspeed.constants``."""

from __future__ import annotations

from ds_hf.engine.comm.process_group import DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT

from ._missing import missing

__all__ = ["TORCH_DISTRIBUTED_DEFAULT_PORT"]
__getattr__ = missing(__name__)
