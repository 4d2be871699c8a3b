"""``torch.autocast`` around the engine's forward, as the state plan says.

Invariant: inside ``engine(...)`` autocast is what the configuration asks for, whatever the caller opened around it, so
that the gradients have the range and the dtype that the reductions expect. Recomputations under activation
checkpointing take it over from the forward that they repeat: torch's checkpoints do that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ds_hf.config.plan import StatePlan
from ds_hf.log import log_once, warn_once

__all__ = ["autocast_of"]


def autocast_of(plan: StatePlan, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which an engine of this plan runs its module.

    Where parameters are sharded nothing is cached: a weight's 16-bit copy would stay until forward ends, of all units
    at once.
    """
    kind, name = device.type, plan.autocast
    inside = torch.is_autocast_enabled(kind)
    if name is None:
        if not inside:
            return nullcontext()
        warn_once(
            "torch.autocast is active around a call of the engine, and is switched off inside: the configuration has "
            'no torch_autocast. Its fp16 and bf16 blocks decide alone; for autocast add "torch_autocast": '
            '{"enabled": true, "dtype": "bf16"}'
        )
        return torch.autocast(kind, enabled=False)
    if inside:
        log_once("torch.autocast around a call of the engine gives way to the configuration's torch_autocast")
        torch.clear_autocast_cache()  # it may hold casts of weights from before the last step
    return torch.autocast(kind, dtype=getattr(torch, name), cache_enabled=not plan.shards_parameters)
