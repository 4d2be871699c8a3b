"""What ``initialize`` refuses among the objects it is given, because training would go on without them, and advice on
what works but takes more than it needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ds_hf.engine.zero.buffer import home_of
from ds_hf.errors import ConfigError

__all__ = ["WORTH_SAYING", "check_optimizer", "check_scheduler", "whole_model_advice"]


def check_optimizer(optimizer: Optimizer) -> None:
    """An optimizer that only calls others would update nothing: what those hold is not what the engine fills."""
    own = {id(group) for group in optimizer.param_groups}
    for name, part in vars(optimizer).items():
        if isinstance(part, Optimizer) and not any(id(group) in own for group in part.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} passes its parameters on to another optimizer ({name}: "
                f"{type(part).__name__}), whose parameters the engine does not know: share the parameter groups "
                "between them, or give one optimizer with several groups"
            )


def check_scheduler(optimizer: Any, lr_scheduler: Any) -> None:
    """A finished scheduler changes the rates of the optimizer it was built on: that one has to be given, too."""
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"lr_scheduler= is a {type(lr_scheduler).__name__} on an optimizer of its own, which the engine does not "
            "step: give that optimizer as optimizer=, or a function from the optimizer to the scheduler"
        )


WORTH_SAYING = 1 << 30  # bytes a process: below, the memory does not matter


def whole_model_advice(params: Iterable[Tensor], world_size: int, *, worth_saying: int = WORTH_SAYING) -> str | None:
    """A message if ``params``, about to be sharded over ``world_size`` processes, are whole in each of them."""
    nbytes = sum(param.numel() * param.element_size() for param in params if home_of(param) is None)
    if world_size == 1 or nbytes < worth_saying:
        return None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (
        f"every process built the whole model ({_gib(nbytes)}; {local} processes on this host: {_gib(nbytes * local)}) "
        f"before it was sharded; a shard is {_gib(nbytes / world_size)}. To load shards only, create the "
        "TrainingArguments before from_pretrained(); without the Trainer keep `dschf = "
        "HfDeepSpeedConfig(ds_config)` in a variable while loading; a model of your own goes under "
        "`with deepspeed.zero.Init(config_dict_or_path=ds_config):`"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):.1f} MiB"
