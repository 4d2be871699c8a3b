"""``deepspeed.constants``."""

from ds_hf.engine.comm.process_group import DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = ["TORCH_DISTRIBUTED_DEFAULT_PORT"]
