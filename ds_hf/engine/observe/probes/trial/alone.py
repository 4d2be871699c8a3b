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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ds_hf.engine.comm.memory import shared_out_of_memory
from ds_hf.engine.observe.probes.learning_rate.feeding import loss_in
from ds_hf.engine.observe.probes.trial.batches import Batch, batch_numel, map_tensors, resized
from ds_hf.engine.observe.probes.trial.memory import is_out_of_memory

if TYPE_CHECKING:
    from ds_hf.engine.observe.probes.trial.replay import Replay
    from ds_hf.engine.parallel.pipeline.module import StageModule

__all__ = ["PipelineLoss", "is_made_of", "takes_statistics", "why_not_alone"]

COPIES = 2
ITEMS = "num_items_in_batch"  # of the whole step, by which transformers' Trainer has a model divide its sum
SAME = 1e-5  # of a loss in fp32, by rounding
NOISE = 1e-2  # of the loss: two passes over one sample that differ by more draw numbers, and tell nothing
_TOGETHER = "its samples count together (a contrastive loss, or a sum)"
DIFFERENT = 0.03  # copies of a sample change a loss in 16 bits by less than this, if they only are averaged


def takes_statistics(module: nn.Module) -> str | None:
    """Why samples do not count by themselves, where ``module`` says so as it is; else ``None``."""
    normed = (each for each in module.modules() if isinstance(each, _BatchNorm))
    if any(each.training or each.running_mean is None for each in normed):
        return "batch norm takes its statistics from each micro-batch"
    return None


def is_made_of(loss: Tensor, own: Tensor) -> bool:
    """Whether ``loss``, with which a script goes backward, is the model's ``own`` one (both of one element), scaled or
    cast at most. What adds to it, or takes its place, has other inputs in its graph."""
    node = loss.grad_fn
    while node is not None and node is not own.grad_fn:
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None
    return node is not None


def why_not_alone(replay: Replay) -> str | None:
    """The same, of losses; ``None`` also where nothing is known. All ranks call it."""
    items = replay.batch.kwargs.get(ITEMS)
    try:
        with shared_out_of_memory(replay.engine.mesh, is_out_of_memory):
            once, again, copies = _losses(replay, (1, 1, COPIES), (None, None, None))
            whole, half = (once, once / 2) if items is None else _losses(replay, (1, 1), (items, 2 * items))
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError):
        replay.clean_up()  # the model trains only, or gives another loss in evaluation
        return None
    noise = _difference(once, again)
    if noise > NOISE:
        return None
    if _difference(once, copies) > DIFFERENT:
        return _TOGETHER
    same = max(SAME if whole.dtype == torch.float32 else DIFFERENT, 10 * noise)
    if _difference(whole, 2 * half) > same:
        part = "a part of its loss (the balance of experts)" if _difference(whole, half) > same else "its loss"
        return (
            f"{part} is not divided by the items of the whole step, and grows with the accumulation steps "
            "(model.accepts_loss_kwargs = False, before the Trainer is made, has it divided)"
        )
    return None


class PipelineLoss:
    """What the loss of a pipeline is computed of: the outputs and labels of its first micro-batch, on the processes
    that compute it. A pipeline runs no other batches than the script's."""

    def __init__(self, module: StageModule) -> None:
        self.module, self._given = module, list[Any]()
        self._loss: Any = module.loss_fn
        self._handle = None
        if isinstance(self._loss, nn.Module):
            self._handle = self._loss.register_forward_pre_hook(self._take)
        elif self._loss is not None:
            module.loss_fn = self._first

    def _first(self, *given: Any) -> Any:
        self._take(None, given)
        return self._loss(*given)

    def _take(self, _: Any, given: tuple[Any, ...]) -> None:
        self._given += map_tensors(given, Tensor.detach)
        self._leave()

    def _leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self.module.loss_fn = self._loss

    def why_not_alone(self) -> str | None:
        """As the function of this name; of a loss that the last layer gives nothing is known. All ranks call it, and
        learn what any knows."""
        self._leave()
        every: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, takes_statistics(self.module) or self._why())
        return next((why for why in every if why is not None), None)

    def _why(self) -> str | None:
        if self._loss is None:
            return "the last layer of the pipeline gives the loss, of which nothing is known"
        numel = batch_numel(tuple(self._given), {})
        if numel is None:  # of a later stage
            return None
        batch = Batch(tuple(self._given), {}, numel)
        try:
            with torch.no_grad():
                once, again, copies = (self._loss(*resized(batch, count, of=1).args) for count in (1, 1, COPIES))
            different = _difference(once, again) <= NOISE and _difference(once, copies) > DIFFERENT
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError):
            return None  # it takes no single sample
        return _TOGETHER if different else None


def _difference(one: Tensor, other: Tensor) -> float:
    """As a share of the larger one; nothing where one of them is not finite."""
    first, second = float(one), float(other)
    largest = max(abs(first), abs(second))
    return abs(first - second) / largest if math.isfinite(first + second) and largest else 0.0


def _losses(replay: Replay, numels: tuple[int, ...], items: tuple[Any, ...]) -> list[Tensor]:
    """Of so many copies of one sample, over so many items; ``None``: as a mean."""
    found = []
    with _evaluating(replay.engine.module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for numel, over in zip(numels, items, strict=True):
            batch = resized(replay.batch, numel, of=1)
            kwargs = {name: value for name, value in batch.kwargs.items() if name != ITEMS}
            loss = loss_in(replay.engine(*batch.args, **kwargs, **({} if over is None else {ITEMS: over})))
            if loss is None:
                raise LookupError("no loss in evaluation")
            found.append(loss.detach())
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
