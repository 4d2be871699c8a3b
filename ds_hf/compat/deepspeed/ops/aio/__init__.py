"""``deepspeed.ops.aio``: the question whether NVMe offload is there, which tests of HF ask. Not yet."""

from __future__ import annotations

from ..._missing import missing


class AsyncIOBuilder:
    """Answers for asynchronous file access as DeepSpeed's builder does."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """False: ds_hf has no NVMe offload yet."""
        return False


__getattr__ = missing(__name__)
