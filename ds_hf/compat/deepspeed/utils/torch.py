"""``deepspeed.utils.torch``."""

from __future__ import annotations

import torch
from packaging.version import Version

__all__ = ["required_torch_version"]


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is of ``min_version`` or later, and of ``max_version`` or earlier; release numbers are compared."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version() takes min_version, max_version or both")
    release = Version(Version(torch.__version__).base_version)
    late = min_version is None or release >= Version(str(min_version))
    return late and (max_version is None or release <= Version(str(max_version)))
