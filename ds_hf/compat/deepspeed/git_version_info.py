"""``deepspeed.git_version_info``: ds_hf has no build of DeepSpeed behind it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_hf.deepspeed_api.accelerator import get_accelerator as _get_accelerator
from ds_hf.deepspeed_api.op_builder import compatible_ops as _compatible_ops

from ._missing import missing

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]


def _torch_info() -> dict[str, Any]:
    """Versions (major.minor) of torch, CUDA, NCCL and HIP that torch was built with, "0.0" for what it has not."""
    cuda, hip = torch.version.cuda, torch.version.hip
    nccl = torch.cuda.nccl.version() if cuda and dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]

    def short(version: str | None) -> str:
        return ".".join(version.split(".")[:2]) if version else "0.0"

    return {
        "version": short(torch.__version__),
        "bf16_support": bool(cuda or hip),
        "cuda_version": short(cuda),
        "nccl_version": short(".".join(map(str, nccl))),
        "hip_version": short(hip),
    }


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
