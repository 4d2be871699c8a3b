"""``deepspeed.ops.aio``: whether NVMe offload is there, which tests of HF ask, and the way to its module."""

from __future__ import annotations

from ds_hf.deepspeed_api.op_builder import BUILDERS

from ..._missing import missing

__all__ = ["AsyncIOBuilder"]

AsyncIOBuilder = BUILDERS["AsyncIOBuilder"]
__getattr__ = missing(__name__)
