"""Restarts and the Trainer: training that was started again goes on from the checkpoint it last wrote.

torch's agents (torchrun, ``deepspeed``, ``ds-hf run``) start all processes again after a failure (``--max_restarts``),
without a host that was lost, and with one that comes (``--nnodes MIN:MAX``). Few scripts look; without this they would
begin from step 0. Only checkpoints of this very run count, those written since its first agent started: an older run's
may lie in the same folder.

Processes of a run need not see the same: an agent that has just come has restarted nothing, and started after the
checkpoint. So they tell each other, and the first one looks.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from ds_hf.log import logger

__all__ = ["go_on_after_restart"]

_CLOCKS_S = 5.0  # by which a host's clock and a file server's may differ


def go_on_after_restart(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Around ``Trainer.train``: in a later attempt, resume from what the earlier ones wrote."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ or trainer.state.global_step > 0:
        return wrapped(*args, **kwargs)
    if trainer.args.deepspeed_plugin is None or kwargs.get("trial") is not None:
        return wrapped(*args, **kwargs)
    newest = _written_by_this_run(Path(trainer.args.output_dir))
    if newest is None:
        return wrapped(*args, **kwargs)
    if trainer.args.process_index == 0:
        logger.warning("started again: training goes on from %s", newest)
    return wrapped(str(newest), *args[1:], **{k: v for k, v in kwargs.items() if k != "resume_from_checkpoint"})


def _written_by_this_run(folder: Path) -> Path | None:
    """The last whole checkpoint that earlier attempts of this run wrote into ``folder``; the same on all processes."""
    agents = [_created(psutil.Process(os.getppid()))]
    starts = [_created(psutil.Process())]
    restarts = [int(os.environ["TORCHELASTIC_RESTART_COUNT"] or 0)]
    together = dist.is_initialized() and dist.get_world_size() > 1
    if together:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (agents[0], starts[0], restarts[0]))
        agents, starts, restarts = (list(column) for column in zip(*told, strict=True))
    found: list[Path | None] = [None]
    if not together or dist.get_rank() == 0:
        # a run that has only changed its size counts no restart: there the file is older than the processes
        until = None if any(restarts) else min(starts) + _CLOCKS_S
        found = [_newest(folder, min(agents), until)]
        if found[0] is not None:
            (found[0] / "trainer_state.json").touch()  # also of this run when its first agent is gone
    if together:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _created(process: psutil.Process) -> float:
    """When ``process`` began, in seconds since the epoch.

    psutil counts from a boot time in whole seconds, up to one too early: a checkpoint that was copied into the folder
    just before the start would count as this run's.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):  # Linux has it
        return float(process.create_time())
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return float(process.create_time() + booted - psutil.boot_time())


def _newest(folder: Path, since: float, until: float | None) -> Path | None:
    """The last checkpoint in ``folder`` that is whole and written between ``since`` and ``until`` (seconds since the
    epoch)."""
    # this module's get_last_checkpoint passes over unfinished ones: see ``hf.resuming``
    trainer: Any = importlib.import_module("transformers.trainer")

    if not folder.is_dir():
        return None
    found = trainer.get_last_checkpoint(str(folder))
    state = Path(found, "trainer_state.json") if found else None
    if state is None or not state.is_file():
        return None
    written = state.stat().st_mtime
    return state.parent if since <= written and (until is None or written <= until) else None
