"""The script's batch with longer or shorter sequences, and the search for the longest that fit.

What is as long as the tokens, in any dim but the first, is made longer with it, by repeating: memory and time are those
of such a sequence, whatever it says. Positions go on counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.engine.modules.positions import positions_of
from ds_hf.engine.observe.probes.trial.batches import Batch, map_tensors, tensors_in

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["find_longest", "length_event", "length_of", "lengthened"]

STEP = 256  # tokens that an answer is a multiple of at most
TRIES = 14
CLOSE = 1.03  # times what fits: what does not is no longer looked for between


def length_of(batch: Batch) -> int | None:
    """Tokens of a sequence; ``None`` where the batch has no whole numbers of [samples, tokens]."""
    named = batch.kwargs.get("input_ids")
    found = tensors_in(named) if named is not None else tensors_in(*batch.args, batch.kwargs)
    return next((int(t.shape[1]) for t in found if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)), None)


def lengthened(batch: Batch, tokens: int) -> Batch:
    """``batch`` with sequences of ``tokens`` tokens."""
    old = length_of(batch)
    if old in (None, tokens):
        return batch

    def change(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == old:
                tensor = tensor.detach().index_select(dim, torch.arange(tokens, device=tensor.device) % old)
        return tensor

    args, kwargs = map_tensors(batch.args, change), map_tensors(dict(batch.kwargs), change)
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape[-1] == tokens:
        first = positions[..., :1]
        kwargs["position_ids"] = first + torch.arange(tokens, device=positions.device, dtype=positions.dtype)
    return Batch(args, kwargs, batch.numel)


def length_event(engine: CoreEngine, batch: Batch) -> dict[str, Any]:
    """The event "length", of whole sequences: processes may share them."""
    shared, own = engine.mesh.shape.sequence, length_of(batch)
    if own is None:
        return {"why": "the batch has no tokens, which are whole numbers of [samples, tokens]"}
    step = shared * max(1, min(STEP, own // 8))
    return {"own": own * shared, "step": step, "most": positions_of(engine.module)}


def find_longest(fits: Callable[[int], bool], first: int, step: int, most: int | None, *, known: bool) -> int:
    """The longest that fits, nearly; 0 if none was found to.

    Args:
        fits: whether a length does.
        first: tried first. step: others are multiples of it. most: none is longer.
        known: ``first`` is a prediction, so that the answer is near it.
    """
    limit = math.inf if most is None else most
    low, high = 0, math.inf  # what fits, and what does not
    guess, growth, falls = min(first, limit), 1.1 if known else 2.0, 0.9 if known else 0.5
    for _ in range(TRIES):
        if fits(int(guess)):
            low = int(guess)
        else:
            high = guess
        if high == math.inf:
            guess, growth = min(max(low * growth, low + step), limit), min(growth**2, 2.0)
        elif low:
            guess = (low + high) / 2
        else:
            guess, falls = high * falls, 0.5
        guess = guess if guess == limit else guess // step * step
        if not low < guess < high or high <= low * CLOSE:
            break
    return low
