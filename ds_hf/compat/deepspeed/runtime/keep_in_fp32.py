"""``deepspeed.runtime.keep_in_fp32``."""

from ds_hf.engine.zero.fp32_buffers import buffers_to_keep_in_fp32, keep_buffers_in_fp32, keep_in_fp32_pattern

__all__ = ["buffers_to_keep_in_fp32", "keep_buffers_in_fp32", "keep_in_fp32_pattern"]
