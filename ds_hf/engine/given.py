"""What ``initialize`` refuses among the objects it is given, because training would go on without them."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ds_hf.errors import ConfigError

__all__ = ["check_optimizer", "check_scheduler"]


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
