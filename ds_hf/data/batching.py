"""Batches of a budget of tokens: samples are put together until they are as many, and the learning rate follows.

A *pack* is what one process computes with at a time; ``effective_batch_size`` packs, over processes and accumulation
steps, make a batch. Packs are filled in order, each as far as the budget goes (DeepSpeed leaves the last sample of a
data set out; here it is in).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_hf.errors import ConfigError
from ds_hf.log import logger, warn_once

__all__ = ["VariableBatchSizeLR", "batch_by_seqlens", "scale_lr"]

Packs = list[tuple[int, list[int]]]


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[Packs, list[int], list[int]]:
    """Packs of at most ``max_tokens``.

    Args:
        seqlens: tokens of each sample.
        sequence_ids_per_mb: the samples to take, all by default.
        min_batch_size, max_batch_size: samples of a pack.
        sequence_picking_order: "dataloader" as they come, "seqlen" from short to long, "random" by ``seed``.
        required_microbatches_of_same_size: the packs of a batch have equally many samples.

    Returns:
        the number of its batch and the samples, of each pack; of each batch the samples; of each batch the longest.

    Raises:
        ConfigError: no sample fits, or all together do not make a batch.
    """
    found = [(int(seqlens[index]), int(index)) for index in (sequence_ids_per_mb or range(len(seqlens)))]
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(found)
    elif sequence_picking_order == "seqlen":
        found.sort()
    elif sequence_picking_order != "dataloader":
        raise ConfigError(f"sequence_picking_order is dataloader, random or seqlen, not {sequence_picking_order!r:.80}")
    fitting = [each for each in found if each[0] <= max_tokens]
    if not found:
        raise ConfigError("there are no samples to put together: the data set is empty", "dynamic_batching")
    if not fitting:
        least = min(tokens for tokens, _ in found)
        raise ConfigError(
            f"no sample fits a budget of {max_tokens} tokens: the shortest has {least}. Raise max_tokens",
            "dynamic_batching",
        )
    if len(fitting) < len(found):
        warn_once(f"{len(found) - len(fitting)} samples are longer than max_tokens {max_tokens}, and are left out")
    together = effective_batch_size if required_microbatches_of_same_size else 1
    packs: list[list[tuple[int, int]]] = []
    start = 0
    while end := _reach(fitting, start, together, max_tokens, min_batch_size, max_batch_size):
        row = fitting[start:end]
        packs += [row[place::together] for place in range(together)]
        start = end
    batches = len(packs) // effective_batch_size
    if not batches:
        raise ConfigError(
            f"{len(fitting)} samples make {len(packs)} packs of {max_tokens} tokens with {min_batch_size} to "
            f"{max_batch_size or 'any number of'} samples, and a batch is {effective_batch_size} packs: lower "
            "max_tokens, or the batch",
            "dynamic_batching",
        )
    groups = [packs[each * effective_batch_size :][:effective_batch_size] for each in range(batches)]
    if verbose:
        for number, group in enumerate(groups):
            tokens = [sum(length for length, _ in pack) for pack in group]
            logger.info("batch %d: tokens of its packs %s, samples %s", number, tokens, [len(pack) for pack in group])
    ids = [(number, [index for _, index in pack]) for number, group in enumerate(groups) for pack in group]
    sizes = [sum(map(len, group)) for group in groups]
    return ids, sizes, [max(length for pack in group for length, _ in pack) for group in groups]


def _reach(
    samples: Sequence[tuple[int, int]], start: int, together: int, tokens: int, least: int, most: int | None
) -> int:
    """Where the packs that begin at ``start`` end, ``together`` of them at a time; 0 where none can be made."""
    sums, reached = [0] * together, 0
    for end in range(start + together, len(samples) + 1, together):
        for place in range(together):
            sums[place] += samples[end - together + place][0]
        count = (end - start) // together
        if max(sums) > tokens or (most and count > most):
            break
        if count >= least:
            reached = end
    return reached


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1.0, method: str | None = "linear") -> float:
    """The learning rate of a batch, of that of ``base_batch_size`` samples.

    Raises:
        ValueError: there is no such method.
    """
    share = batch_size / base_batch_size
    if method is None or method.lower() == "none":
        return base_lr
    if method not in ("linear", "sqrt"):
        raise ValueError(f"a learning rate is scaled linear, sqrt or none, not {method!r}")
    return base_lr * (share if method == "linear" else math.sqrt(share))


class VariableBatchSizeLR:
    """A schedule whose rates are scaled by the size of the batch that comes next.

    Args:
        lr_scheduler: gives the rates before that; an optimizer, whose rates stay, does as well.
        base_batch_size: for which they are meant.
        batch_sizes: of the batches of an epoch, in order.
        position: which batch comes next; the number of ``step`` calls by default.

    Raises:
        ConfigError: ``lr_scheduler`` changes rates by a metric, so what it gives is not known before.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
        *,
        position: Callable[[], int] | None = None,
    ) -> None:
        scheduled = hasattr(lr_scheduler, "step") and hasattr(lr_scheduler, "optimizer")
        if scheduled and type(lr_scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR"):
            raise ConfigError(
                f"{type(lr_scheduler).__name__} changes the rates that it finds, and dynamic_batching has scaled them: "
                'take another schedule, or "lr_scaling_method": "none"',
                "dynamic_batching",
            )
        self.base_lr_scheduler = lr_scheduler if scheduled else None
        self.optimizer = lr_scheduler if self.base_lr_scheduler is None else lr_scheduler.optimizer
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.lr_scaling_method, self.dataloader, self.verbose = lr_scaling_method, dataloader, verbose
        self._position = position
        self.base_lrs, self._unscaled, self._given = self._rates(), self._rates(), self._rates()
        self.last_epoch = last_epoch + 1
        self.rescale()

    def __getattr__(self, name: str) -> Any:
        """What else the schedule has (``total_steps``, which accelerate looks for)."""
        base = vars(self).get("base_lr_scheduler")
        if base is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(base, name)

    def _rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def rescale(self, *, ahead: bool = False) -> None:
        """Give groups the rates of the batch that comes next.

        Args:
            ahead: ``step`` comes after this, or not, where no step was made; ``get_last_lr`` gives the rates before.
        """
        self._look()
        before = self._rates()
        self._scale()
        self._last = before if ahead else self._rates()

    def _look(self) -> None:
        """Tell of rates that something else has changed since they were given; new groups begin with theirs."""
        rates = self._rates()
        self._unscaled += rates[len(self._unscaled) :]
        if any(now is not then and float(now) != float(then) for now, then in zip(rates, self._given, strict=False)):
            warn_once(
                "dynamic_batching scales the rates of its schedule by the sizes of batches, and something else has set "
                "the rates of the optimizer: what it sets is not scaled, and does not stay. Give the schedule to "
                'initialize(lr_scheduler=...) or accelerator.prepare(), or take "lr_scaling_method": "none"'
            )

    def _scale(self) -> None:
        place = self.last_epoch if self._position is None else self._position()
        size = self.batch_sizes[place % len(self.batch_sizes)]
        for group, rate in zip(self.optimizer.param_groups, self._unscaled, strict=True):
            group["lr"] = scale_lr(self.base_batch_size, size, rate, self.lr_scaling_method)
        self._given = self._rates()
        if self.verbose:
            logger.info("batch %d has %d samples: learning rates %s", place, size, self._rates())

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next batch, or to ``epoch``."""
        self._look()
        for group, rate in zip(self.optimizer.param_groups, self._unscaled, strict=True):
            group["lr"] = rate
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.step() if epoch is None else self.base_lr_scheduler.step(epoch)
        self._unscaled = self._rates()
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()
        self._last = self._given

    def get_lr(self) -> list[float]:
        """The rates of the next batch."""
        return self._rates()

    def get_last_lr(self) -> list[float]:
        """The rates that ``step`` set, or, until it is called, those of the step that was made."""
        return list(self._last)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints; batches follow from the data."""
        base = None if self.base_lr_scheduler is None else self.base_lr_scheduler.state_dict()
        return {"base_lr_scheduler": base, "last_epoch": self.last_epoch, "unscaled": list(self._unscaled)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there; also from the state of the schedule alone, whose batches had one size."""
        alone = "base_lr_scheduler" not in state_dict
        base = state_dict if alone else state_dict["base_lr_scheduler"]
        if self.base_lr_scheduler is not None and base is not None:
            self.base_lr_scheduler.load_state_dict(base)
        if not alone:
            self.last_epoch, self._unscaled = state_dict["last_epoch"], list(state_dict["unscaled"])
        if self._position is None:  # else the groups' own rates are restored, and the place is not known yet
            self._scale()
        self._last = self._given = self._rates()

    def resume(self, rates: Sequence[float] | None) -> None:
        """Rates that were restored, unscaled, if they were; and the place is known now."""
        if rates is not None:
            self._unscaled = list(rates)
        self._scale()
        self._last = self._given

    @property
    def unscaled(self) -> list[float]:
        """The rates of groups for ``base_batch_size``."""
        return list(self._unscaled)
