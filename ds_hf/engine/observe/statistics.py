"""Running statistics of batch norm follow the batches of each process, which is told where a model trains with them.

It is asked at a step and not when the engine is made: models come in evaluation from transformers, are put in training
later, and leave layers of batch norm out of it as they like.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ds_hf.log import warn_once

__all__ = ["attach"]


def attach(engine: Any) -> None:
    """Let steps of ``engine`` say so once."""
    normed = [module for module in engine.module.modules() if isinstance(module, _NormBase)]
    own = [module for module in normed if not isinstance(module, nn.SyncBatchNorm) and module.momentum != 0]

    def tell(_: Any) -> None:
        found = next((each for each in own if each.training and each.running_mean is not None), None)
        if found is not None:
            own.clear()
            warn_once(
                f"{type(found).__name__} keeps running statistics of the batches of its own process: evaluations amid "
                "training are of other statistics on each, and files have those of process 0 (DDP sends these to all "
                "before each forward). Before evaluating, call torch.distributed.broadcast(buffer, 0) for the model's "
                "buffers, or train with nn.SyncBatchNorm.convert_sync_batchnorm(model), which needs GPUs"
            )

    engine.events.step_hooks.append(tell)
