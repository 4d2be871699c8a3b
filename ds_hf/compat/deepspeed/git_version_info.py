"""``deepspeed.git_version_info``: ds_hf has no build of DeepSpeed behind it."""

from __future__ import annotations

from ds_hf.deepspeed_api.accelerator import get_accelerator as _get_accelerator
from ds_hf.deepspeed_api.op_builder import compatible_ops as _compatible_ops
from ds_hf.deepspeed_api.runtime_utils import torch_info as _torch_info

from ._missing import missing

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

version = "0.19.8+ds.hf"
git_hash = git_branch = "ds_hf"
compatible_ops = _compatible_ops()
installed_ops = dict.fromkeys(compatible_ops, False)  # built beforehand: kernels are made when they are first used
torch_info = _torch_info()


def __getattr__(name: str) -> object:
    if name == "accelerator_name":  # asks for the device, which importing does not
        return _get_accelerator().device_name()
    return _absent(name)


_absent = missing(__name__)
