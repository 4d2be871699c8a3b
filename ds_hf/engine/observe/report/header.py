"""What a report has to know of the run that it is about: the first line of each rank's file."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_hf.config.written import as_written
from ds_hf.engine.observe.model_flops import ModelFlops, matrix_rate
from ds_hf.engine.observe.probes.trial.survey import facts
from ds_hf.host import local_world_size
from ds_hf.log import logger

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["VERSION", "header_of"]

VERSION = 1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def header_of(engine: CoreEngine) -> dict[str, Any]:
    """The line, of values that JSON has.

    ``clock`` is the kernel whose monotonic clock the times are of: ranks with the same one need no alignment.
    """
    mesh, batch, plan = engine.mesh, engine.batch, engine.plan
    flops = ModelFlops.of(engine.module)
    dtype = engine.compute_dtype or _widest(engine)
    total = None
    written, file = as_written(engine.config, engine.settings.source)
    if engine.device.type == "cuda":
        total = torch.cuda.get_device_properties(engine.device).total_memory
    return {
        "header": VERSION,
        "rank": mesh.world.rank,
        "world_size": mesh.world.world_size,
        "host": socket.gethostname(),
        "clock": _clock() if engine.device.type == "cpu" else "",
        "pid": os.getpid(),
        "started": time.time(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "matrix_rate": matrix_rate(engine.device, dtype),
        "flops_a_token": flops.matrices,
        "flops_a_token_and_position": flops.attention,
        "model_name": type(engine.module).__name__,
        "mesh": {name: getattr(mesh.shape, name) for name in ("pipe", "data", "sequence", "tensor")},
        "hosts_of": local_world_size(),
        "batch": {"train": batch.train, "micro": batch.micro, "accumulation": batch.accumulation_steps},
        "plan": {
            row: {"placement": getattr(plan, row).placement.value, "device": getattr(plan, row).device}
            for row in ("parameters", "gradients", "optimizer")
        },
        "facts": facts(engine, total),
        "config": _plain(engine.config),
        "written": _plain(written),
        "source": file or engine.settings.source,
    }


def _widest(engine: CoreEngine) -> torch.dtype:
    return next((param.dtype for param in engine.module.parameters() if param.is_floating_point()), torch.float32)


def _clock() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        logger.debug("no boot id: times of ranks are aligned by their collectives")
        return ""


def _plain(value: Any) -> Any:
    """``value`` as JSON has it; what it has not becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
