"""``deepspeed.git_version_info``: ds_hf has no build of DeepSpeed behind it."""

from __future__ import annotations

from ds_hf.engine.dist.native_ops import compatible_ops as _compatible_ops

from ._missing import missing

__all__ = ["compatible_ops", "git_branch", "git_hash", "version"]

version = "0.19.8+ds.hf"
git_hash = git_branch = "ds_hf"
compatible_ops = _compatible_ops()

__getattr__ = missing(__name__)
