"""``deepspeed.runtime.data_pipeline``."""
