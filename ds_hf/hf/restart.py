"""``--max_restarts`` and the Trainer: training that was started again goes on from the checkpoint it last wrote.

torch's agent (torchrun, ``deepspeed``, ``ds-hf run``) starts all processes again after a failure and says so in
TORCHELASTIC_RESTART_COUNT. Few scripts look; without this they would begin from step 0. Only checkpoints of this very
run count, those written since the agent started: an older run's may lie in the same folder.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ds_hf.log import logger

__all__ = ["go_on_after_restart"]


def go_on_after_restart(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Around ``Trainer.train``: in a later attempt, resume from what the earlier ones wrote."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") in ("", "0") or trainer.state.global_step > 0:
        return wrapped(*args, **kwargs)
    if trainer.args.deepspeed_plugin is None or kwargs.get("trial") is not None:
        return wrapped(*args, **kwargs)
    newest = _newest(Path(trainer.args.output_dir), psutil.Process(os.getppid()).create_time())
    if newest is None:
        return wrapped(*args, **kwargs)
    if trainer.args.process_index == 0:
        logger.warning("started again after a failure: training goes on from %s", newest)
    return wrapped(str(newest), *args[1:], **{k: v for k, v in kwargs.items() if k != "resume_from_checkpoint"})


def _newest(folder: Path, since: float) -> Path | None:
    """The last checkpoint in ``folder`` that is whole and written after ``since`` (seconds since the epoch)."""
    # this module's get_last_checkpoint passes over unfinished ones: see ``hf.trainer``
    trainer: Any = importlib.import_module("transformers.trainer")

    if not folder.is_dir():
        return None
    found = trainer.get_last_checkpoint(str(folder))
    state = Path(found, "trainer_state.json") if found else None
    return state.parent if state is not None and state.is_file() and state.stat().st_mtime >= since else None
