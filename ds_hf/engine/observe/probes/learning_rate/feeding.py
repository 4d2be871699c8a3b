"""Losses for a search from batches that are at hand, and the function behind ``engine.lr_range_test``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.engine.comm.collectives import all_reduce_max
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.engine.observe.probes.learning_rate.probe import Fed, Search, Tell, Want, search
from ds_hf.errors import DsHfError
from ds_hf.lr import LrOptions, LrResult

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["LossOf", "drive", "loss_in", "range_test"]

LossOf = Callable[[Any, Any], Tensor]


def range_test(
    engine: CoreEngine,
    batches: Iterable[Any],
    held_out: Iterable[Any] | None,
    loss_of: LossOf | None,
    options: LrOptions,
    tell: Tell | None = None,
) -> LrResult:
    """See ``Engine.lr_range_test``."""
    steps = engine.accumulation.steps
    wanted_train = options.train_batches * steps
    wanted_held = options.held_out_batches * steps
    train = list(islice(batches, wanted_train + (wanted_held if held_out is None else 0)))
    aside = list(islice(held_out, wanted_held)) if held_out is not None else _set_aside(train, wanted_held, steps)
    counts = _least_of_all(engine, [len(train) // steps, len(aside) // steps])
    if not all(counts):
        raise DsHfError(
            f"a learning-rate test needs batches for at least two updates ({steps} micro-batches each), one to train "
            f"on and one set aside; a process has {counts[0]} and {counts[1]}"
        )
    few = counts[0] < options.train_batches or counts[1] < options.held_out_batches
    options = replace(options, train_batches=counts[0], held_out_batches=counts[1])
    compute = loss_of or _loss_of

    def feed(want: Want) -> Fed:
        batch = (aside if want.held_out else train)[want.batch * steps + want.micro]
        with torch.set_grad_enabled(not want.held_out):
            loss = compute(engine, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the loss of a batch must be one number: give loss_of=, a function of (engine, batch)")
        return Fed(loss, share=1 / steps, evaluated=want.held_out)

    result = drive(search(engine, options, tell), feed)
    return replace(result, notes=(f"only {sum(counts)} batches were given",)) if few else result


def _set_aside(train: list[Any], wanted: int, steps: int) -> list[Any]:
    """Take the last batches out of ``train``: at most half, and whole updates of ``steps`` micro-batches."""
    groups = len(train) // steps
    keep = groups - min(wanted // steps, groups // 2)
    aside = train[keep * steps : groups * steps]
    del train[keep * steps :]
    return aside


def _least_of_all(engine: CoreEngine, counts: list[int]) -> list[int]:
    """The least of each count over the ranks, which all have to take part in every update."""
    negated = -torch.tensor(counts, device=compute_device())
    found: list[int] = (-all_reduce_max(negated, engine.mesh.world, "the batches of a learning-rate test")).tolist()
    return found


def drive(searching: Search, feed: Callable[[Want], Fed]) -> LrResult:
    """Answer every want of a search with ``feed``, to its end."""
    try:
        want = next(searching)
        while True:
            want = searching.send(feed(want))
    except StopIteration as end:
        result: LrResult = end.value
        return result
    finally:
        searching.close()


def _loss_of(engine: Any, batch: Any) -> Tensor:
    """The loss that the model returns for a batch: a mapping of keywords, a sequence of arguments, or one argument."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        batch = {key: _placed(value, engine) for key, value in batch.items()}
        output = engine(**batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        output = engine(*(_placed(value, engine) for value in batch))
    else:
        output = engine(_placed(batch, engine))
    loss = loss_in(output)
    if loss is None:
        raise ValueError(
            f"the model returns no loss but {type(output).__name__}: give loss_of=, a function of (engine, batch)"
        )
    return loss


def _placed(value: Any, engine: Any) -> Any:
    return value.to(engine.device) if isinstance(value, Tensor) else value


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a model returned: itself, ``.loss``, ``["loss"]`` or the first of a tuple."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    elif not isinstance(output, Tensor):
        output = getattr(output, "loss", None)
    return output if isinstance(output, Tensor) and output.numel() == 1 else None
