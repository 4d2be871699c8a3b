"""Whether a step's gradients stay what they are when its batch is divided into other micro-batches.

They do where samples count by themselves: the loss of a micro-batch is a mean over them. A contrastive loss compares
the samples of a micro-batch, a sum grows with them, and batch norm takes its statistics from them. Nothing is known
from a model's name: the loss of one sample is compared with that of copies of it, in evaluation, where nothing is
dropped out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ds_hf.engine.observe.probes.learning_rate.feeding import loss_in
from ds_hf.engine.observe.probes.trial.batches import resized

if TYPE_CHECKING:
    from ds_hf.engine.observe.probes.trial.replay import Replay

__all__ = ["takes_statistics", "why_not_alone"]

COPIES = 3
SAME = 1e-3  # of the loss: two passes over one sample that differ by more draw numbers, and tell nothing
DIFFERENT = 0.03  # copies of a sample change a loss in 16 bits by less than this, if they only are averaged


def takes_statistics(module: nn.Module) -> str | None:
    """Why samples do not count by themselves, where ``module`` says so as it is; else ``None``."""
    normed = (each for each in module.modules() if isinstance(each, _BatchNorm))
    if any(each.training or each.running_mean is None for each in normed):
        return "batch norm takes its statistics from each micro-batch"
    return None


def why_not_alone(replay: Replay) -> str | None:
    """The same, of losses; ``None`` also where nothing is known. All ranks call it."""
    try:
        once, again, copies = _losses(replay)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        replay.clean_up()  # the model trains only, or gives another loss in evaluation
        return None
    if _differ(once, again, SAME) or not _differ(once, copies, DIFFERENT):
        return None
    return "its samples count together (a contrastive loss, or a sum)"


def _differ(one: float, other: float, share: float) -> bool:
    return math.isfinite(one + other) and abs(one - other) > share * max(abs(one), abs(other)) + 1e-6


def _losses(replay: Replay) -> list[float]:
    """Of one sample, of it once more, and of copies of it; as means, whatever the script divides by."""
    found = []
    with _evaluating(replay.engine.module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for numel in (1, 1, COPIES):
            batch = resized(replay.batch, numel, of=1)
            kwargs = {name: value for name, value in batch.kwargs.items() if name != "num_items_in_batch"}
            loss = loss_in(replay.engine(*batch.args, **kwargs))
            if loss is None:
                raise LookupError("no loss in evaluation")
            found.append(float(loss))
    return found


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
