"""Whether a real DeepSpeed is installed, which then gets the commands ``deepspeed``, ``ds`` and ``ds_report``.

Found by its place, without importing it: ``find_spec`` of a top-level name runs no code of the package.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["call_real", "real_deepspeed"]


def real_deepspeed() -> Path | None:
    """The folder of a DeepSpeed that is not ds_hf's stand-in, if that is what ``import deepspeed`` would find."""
    try:
        spec = find_spec("deepspeed")
    except ValueError:  # somebody put a module without a spec there
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parent
    ours = Path(__file__).resolve().parents[1] / "compat"
    return None if folder.is_relative_to(ours) else folder


def call_real(module: str, function: str) -> Any:
    """Call what DeepSpeed's own console script calls; it reads ``sys.argv``."""
    return getattr(importlib.import_module(module), function)()
