"""``deepspeed.ops.aio``: whether NVMe offload is there, which tests of HF ask, and the way to its module."""

from ds_hf.deepspeed_api.op_builder import BUILDERS

__all__ = ["AsyncIOBuilder"]

AsyncIOBuilder = BUILDERS["AsyncIOBuilder"]
