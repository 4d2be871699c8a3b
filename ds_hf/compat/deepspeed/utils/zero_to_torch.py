"""``deepspeed.utils.zero_to_torch``: the command line of ``zero_to_fp32``, which takes ``--dtype``."""

from __future__ import annotations

from ds_hf.checkpoint.zero_to_fp32 import main

from .._missing import missing

__all__ = ["main"]
__getattr__ = missing(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
