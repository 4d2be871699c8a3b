"""What ZenFlow cannot be combined with, as far as the file alone does not say it (``config/rules.py``)."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam
from ds_hf.engine.optim.streaming import streamed_update
from ds_hf.errors import ConfigError, Fault

__all__ = ["check_zenflow"]

_POINTER = "/zero_optimization/zenflow"


def check_zenflow(mesh: Mesh, inner: Optimizer) -> None:
    """Raises:
    ConfigError: the optimizer is not Adam, or more than data and sequences is divided over processes.
    """
    own = isinstance(inner, FusedAdam | DeepSpeedCPUAdam) or type(inner) in (torch.optim.Adam, torch.optim.AdamW)
    if not own or streamed_update(inner) is None:
        message = f"ZenFlow keeps moments of Adam, which {type(inner).__name__}, as it is set here, does not have"
        raise ConfigError([Fault(_POINTER, message, 'take "AdamW" or "Adam", without hooks and amsgrad')])
    divided = {
        "layers (tensor parallelism)": mesh.shape.tensor > 1,
        "experts": mesh.shape.expert > 1,
        "the model (mpu)": mesh.is_given,
        "layers (pipelines)": mesh.shape.pipe > 1,
        "states over parts of the processes (mics_shard_size, zero_hpz_partition_size)": mesh.shape.inner is not None,
    }
    for what, is_so in divided.items():
        if is_so:
            message = f"columns are ranked over all processes, and here {what} are divided otherwise"
            raise ConfigError([Fault(_POINTER, message, "remove zenflow; offload_optimizer alone works")])
