"""What timers ask of the device of this process: CUDA where there is one, the processor otherwise."""

from __future__ import annotations

import platform
import resource

import psutil
import torch

__all__ = ["allocated_nbytes", "peak_allocated_nbytes", "peak_resident_nbytes", "resident_nbytes", "synchronize"]


def synchronize() -> None:
    """Wait until the device is idle; on the processor everything has happened already."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated_nbytes() -> int:
    """Bytes in tensors of the device; without one, resident bytes of this process."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_nbytes()


def peak_allocated_nbytes() -> int:
    """Peak of ``allocated_nbytes``."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident_nbytes()


def resident_nbytes() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_nbytes() -> int:
    """Peak of resident bytes since the process started."""
    # macOS counts bytes where Linux counts KiB.
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
