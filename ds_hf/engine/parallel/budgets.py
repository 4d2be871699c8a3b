"""A loader of batches with a budget of tokens (``dynamic_batching``), and the learning rate that follows their size.

Packs are made once, the same on every process; each takes its own of each batch, so all have as many.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ds_hf.config.types import Config
from ds_hf.data.batching import VariableBatchSizeLR, batch_by_seqlens
from ds_hf.data.index_files import MMapIndexedDataset, read_numbers
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Observer
from ds_hf.engine.zero.hooks import Hook
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import warn_once

__all__ = ["BATCHES", "BatchRates", "BudgetLoader", "attach", "budget_loader", "follow_sizes", "lengths_of", "packs_of"]

BATCHES = "dynamic_batching"  # among what an engine keeps
_POINTER = "/data_efficiency/data_sampling/dynamic_batching"


class BudgetLoader(DataLoader[Any]):
    """One rank's micro-batches; ``iter()`` starts an epoch, or goes on where a loaded state stood.

    Attributes:
        batch_sizes: samples of each batch of an epoch, of all processes.
        packs: the samples of each of this rank's micro-batches.
        processes, micro: by which the state counts: packs of all processes.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        packs: Sequence[Sequence[int]],
        batch_sizes: Sequence[int],
        *,
        processes: int,
        micro: int,
        **options: Any,
    ) -> None:
        self.packs, self.batch_sizes = packs, list(batch_sizes)
        self.processes, self.micro = processes, micro
        self.epoch = self._taken = 0
        self._loaded: dict[str, int] | None = None  # the state, until a batch is taken
        # An own generator: torch would otherwise draw the workers' seed from the global one, and change the run.
        super().__init__(dataset, batch_sampler=_Rest(self), generator=torch.Generator(), **options)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self._taken += 1
            self._loaded = None
            yield batch
        self.epoch, self._taken = self.epoch + 1, 0

    def rest(self) -> Sequence[Sequence[int]]:
        """What is left of the epoch."""
        if self._taken >= len(self.packs):
            self.epoch, self._taken = self.epoch + 1, 0
        return self.packs[self._taken :]

    @property
    def _steps(self) -> int:
        """Micro-batches of this rank in a batch."""
        return len(self.packs) // len(self.batch_sizes)

    @property
    def next_batch(self) -> int:
        """Batches that were taken, or passed over, in all epochs."""
        return self.epoch * len(self.batch_sizes) + self._taken // self._steps

    def state_dict(self) -> dict[str, int]:
        """The epoch, the packs of it that all ranks together have taken, and how many a batch has; the samples of the
        batches that are over."""
        if self._loaded is not None:
            return dict(self._loaded)
        size = self.processes * self.micro
        samples = sum(self.batch_sizes[: self._taken // self._steps])
        place = {"epoch": self.epoch, "samples": self._taken * size, "seed": 0, "packs": self._steps * size}
        return {**place, "drawn": samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next ``iter()`` continue where ``state`` was taken; with batches of another size, or other budgets,
        at the next of them that is whole."""
        train = self._steps * self.processes * self.micro
        self.epoch, self._taken = state["epoch"], state["samples"] // (self.processes * self.micro)
        before = list(accumulate(self.batch_sizes, initial=0))  # samples of an epoch before each batch
        # what older versions did not write is taken as if packs were the same
        drawn = state.get("drawn", before[min(state["samples"] // train, len(self.batch_sizes))])
        if state["packs"] != train:
            batch = bisect_left(before, drawn) if "drawn" in state else -(-state["samples"] // train)
            self._go_on(f"batches of {state['packs']} packs, and they have {train} now", batch)
        elif drawn not in before[state["samples"] // train :][:1]:
            self._go_on("other packs, as of another max_tokens", bisect_left(before, drawn))
        self._loaded = dict(state)

    def _go_on(self, changed: str, batch: int) -> None:
        self._taken = batch * self._steps
        warn_once(
            f"the checkpoint was written with {changed}: the epoch goes on with batch {batch} of "
            f"{len(self.batch_sizes)}, the next that begins with a sample that has not been taken"
        )


class _Rest:
    """What is left of the loader's epoch, as a batch sampler."""

    def __init__(self, loader: BudgetLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.loader.rest())

    def __len__(self) -> int:
        return len(self.loader.packs)


def lengths_of(path: str | None, total: int) -> Sequence[int]:
    """Tokens of each sample: of a ``.npy`` file, an indexed file, or a folder that an analyzer of "seqlen" wrote.

    Raises:
        ConfigError: there are none, or not of this data set.
    """
    inside = None if path is None else os.path.join(path, "seqlen", "seqlen_sample_to_metric")
    try:
        if path is None:
            raise DsHfError("no file of lengths is named")
        found = read_numbers(inside if inside is not None and MMapIndexedDataset.exists(inside) else path)
    except DsHfError as error:
        raise ConfigError(
            f"dynamic batching needs the length of each sample, and {error}. Let DataAnalyzer write the metric "
            '"seqlen" into the folder of metrics_path, or give a .npy file of lengths there',
            f"{_POINTER}/metrics_path",
        ) from error
    if len(found) != total:
        raise ConfigError(
            f"{path} has the lengths of {len(found):_} samples, and the data set has {total:_}: analyze this one anew",
            f"{_POINTER}/metrics_path",
        )
    numbers = np.asarray(found)
    if strange := int((~(np.isfinite(numbers) & (numbers >= 0))).sum()):
        raise ConfigError(
            f"{path} has {strange:_} lengths that are negative or not finite: write the tokens of each sample",
            f"{_POINTER}/metrics_path",
        )
    return [int(each) for each in found]


def packs_of(
    settings: Config, lengths: Sequence[int], train: int, samples: Sequence[int] | None = None, *, logs: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Packs of an epoch, ``train`` of them a batch, and the samples of each batch.

    Raises:
        ConfigError: no sample fits, or all together do not make a batch.
    """
    section = settings.data_efficiency.data_sampling.dynamic_batching
    assert section.max_tokens is not None
    ids, sizes, _ = batch_by_seqlens(
        lengths,
        section.max_tokens,
        samples,
        section.min_batch_size,
        section.max_batch_size,
        section.sequence_picking_order,
        train,
        verbose=section.verbose and logs,
        seed=settings.data_efficiency.seed,
    )
    return [pack for _, pack in ids], sizes


def budget_loader(
    settings: Config,
    mesh: Mesh,
    batch: BatchSizes,
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    lengths: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
) -> BudgetLoader:
    """A loader of this rank's micro-batches of ``dataset``.

    Args:
        lengths: tokens of each sample; those of ``metrics_path`` by default.
        samples: which to take.

    Raises:
        ConfigError: lengths are missing or of another data set, no sample fits, or stages would need equal batches.
    """
    sampling = settings.data_efficiency.data_sampling
    if mesh.shape.pipe > 1:
        raise ConfigError("stages of a pipeline exchange batches of one shape: disable dynamic_batching", _POINTER)
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"dynamic batching needs a length, and {type(dataset).__name__} has none", _POINTER)
    if lengths is None:
        lengths = lengths_of(sampling.dynamic_batching.metrics_path, len(dataset))
    every, sizes = packs_of(settings, lengths, batch.train, samples, logs=mesh.world.rank == 0)
    mine = every[mesh.sample_rank :: mesh.shape.data]
    packs = [list(chain(*mine[place : place + batch.micro])) for place in range(0, len(mine), batch.micro)]
    return BudgetLoader(
        dataset,
        packs,
        sizes,
        processes=mesh.shape.data,
        micro=batch.micro,
        collate_fn=collate_fn,
        num_workers=sampling.num_workers,
        pin_memory=sampling.pin_memory and torch.cuda.is_available(),
    )


class BatchRates:
    """Rates that follow the sizes of batches, as an engine keeps them.

    Attributes:
        follower: the schedule that scales them; ``None`` where ``lr_scaling_method`` is "none".
    """

    def __init__(self, engine: Any, loader: Any) -> None:
        self.engine, self.loader = engine, loader
        self.follower: VariableBatchSizeLR | None = None
        self._passed = 0  # batches that were taken without a step, when a run resumed with others

    def position(self) -> int:
        """Which batch comes next."""
        return int(self.engine.global_steps) + self._passed

    def state_dict(self) -> dict[str, Any]:
        """The rates without the size of a batch, which a run with other batches begins with; the samples of the batches
        that are over."""
        rates = {} if self.follower is None else {"rates": self.follower.unscaled}
        return {**rates, "samples": self._samples()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All follows from what is loaded besides: see ``resume``. A loader that is not the engine's own is told what
        to pass over by who counts batches."""
        now = self._samples()
        if self.loader is not self.engine.training_dataloader and state.get("samples", now) != now:
            warn_once(
                f"the {self.position()} batches of the checkpoint had {state['samples']} samples, and as many have "
                f"{now} now, as with another max_tokens or train_batch_size: who counts batches to pass over what was "
                f"trained on, as the Trainer does, {'takes samples twice' if now < state['samples'] else 'loses some'}"
            )

    def _samples(self) -> int:
        sizes: list[int] = self.loader.batch_sizes
        epochs, batches = divmod(self.position(), len(sizes))
        return epochs * sum(sizes) + sum(sizes[:batches])

    def resume(self, rates: Sequence[float] | None) -> None:
        """A checkpoint has been loaded, and the batch that comes next may be another than when it was written.

        Args:
            rates: that were restored, without the size of a batch.
        """
        if self.loader is self.engine.training_dataloader:
            self._passed = self.loader.next_batch - self.engine.global_steps
        if self.follower is not None:
            self.follower.resume(rates)


def follow_sizes(engine: Any, loader: Any, scheduler: Any = None) -> Any:
    """A schedule that scales the rates of ``scheduler``, by default the engine's own, by the sizes of batches.

    Args:
        loader: has ``batch_sizes``, the samples of each batch of an epoch.

    Raises:
        ConfigError: the schedule follows a metric.
    """
    section, given = engine.settings.data_efficiency.data_sampling.dynamic_batching, scheduler or engine.lr_scheduler
    engine.kept[BATCHES] = rates = BatchRates(engine, loader)
    if section.lr_scaling_method == "none":
        return given
    follower = VariableBatchSizeLR(
        given if given is not None else engine.optimizer.optimizer,
        engine.batch.train,
        loader.batch_sizes,
        loader,
        section.lr_scaling_method,
        verbose=section.verbose and engine.mesh.world.rank == 0,
        position=rates.position,
    )
    rates.follower = follower
    ahead = scheduler is not None  # the loop steps it when it has logged the rates of this step
    engine.step_hooks.append(lambda _: follower.rescale(ahead=ahead))  # also after a step that was skipped
    return follower


class _Watch(Observer):
    """Tells, when the model is first trained, if nothing makes the batches that the configuration asks for."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.handle = engine.module.register_forward_pre_hook(Hook(self.look))

    def look(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self.close()
        if BATCHES not in self.engine.kept:
            warn_once(
                "dynamic_batching has no effect: nothing makes its batches. Give initialize() the training_data, and "
                "take the loader that it returns; or give accelerator.prepare() the DataLoader that shuffles"
            )

    def close(self) -> None:
        self.handle.remove()


def attach(engine: Any) -> None:
    """Look at the first batch, if it should be one of packs."""
    if engine.settings.data_efficiency.batches_by_tokens:
        engine.events.add(_Watch(engine))
