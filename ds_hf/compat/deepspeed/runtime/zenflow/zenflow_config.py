"""``deepspeed.runtime.zenflow.zenflow_config``: the section ``zero_optimization.zenflow``."""

from ds_hf.config.types.zero import ZenFlowSection as ZenFlowConfig

__all__ = ["ZenFlowConfig"]
