"""``deepspeed.env_report``: what ``ds_report`` tells, for scripts that run it with ``python -m``."""

from __future__ import annotations

from ds_hf.cli.doctor import report_main as cli_main
from ds_hf.cli.doctor import report_main as main

__all__ = ["cli_main", "main"]

if __name__ == "__main__":
    main()
