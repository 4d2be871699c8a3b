"""Whose ``deepspeed`` an import finds: ds_hf's stand-in, or a real DeepSpeed, which comes first on ``sys.path``.

Found by its place, without importing it: ``find_spec`` of a top-level name runs no code of the package.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["beside_real", "real_deepspeed"]


def real_deepspeed() -> Path | None:
    """The folder of a DeepSpeed that is not ds_hf's stand-in, if that is what ``import deepspeed`` would find."""
    try:
        spec = find_spec("deepspeed")
    except ValueError:  # a module without a spec was put there
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parent
    ours = Path(__file__).resolve().parent / "compat"
    return None if folder.is_relative_to(ours) else folder


def beside_real() -> str:
    """One line for who installed ds_hf where a real DeepSpeed is; empty where there is none."""
    folder = real_deepspeed()
    if folder is None:
        return ""
    fix = "`pip uninstall deepspeed` and a reinstall of ds-hf hand the name over"
    return f"the real DeepSpeed at {folder} still serves the name deepspeed, and ds_hf does not; {fix}"
