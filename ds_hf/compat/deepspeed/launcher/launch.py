"""``deepspeed.launcher.launch``: one host's processes, for scripts that run it with ``python -m`` on every host."""

from __future__ import annotations

from ds_hf.launcher.one_host import main


if __name__ == "__main__":
    raise SystemExit(main())
