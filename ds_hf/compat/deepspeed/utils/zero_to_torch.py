"""``deepspeed.utils.zero_to_torch``: the command line of ``zero_to_fp32``, which takes ``--dtype``."""

from __future__ import annotations

from ds_hf.checkpoint.zero_to_fp32 import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
