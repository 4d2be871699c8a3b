"""Batches of a budget of tokens (``dynamic_batching``) in the Trainer and in accelerate's loop.

The packs of all processes are a loader's batch sampler, and accelerate deals its micro-batches out: each process has as
many, those that ``BudgetLoader`` would give it. What is left is to scale rates by what comes next, once there is an
engine. Batches follow from the file and from lengths, so skipping the first of an epoch is all that resuming needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from ds_hf.config.load import load_config
from ds_hf.config.types import Config
from ds_hf.data.sampler import DeepSpeedDataSampler
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = [
    "TokenBatches", "TokenSampler", "batches_in", "check_trainer", "follow_batches", "follow_schedule", "sampler_of",
    "with_batches",
]  # fmt: skip

POINTER = "/data_efficiency/data_sampling/dynamic_batching"
_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class TokenBatches:
    """Micro-batches of all processes, in turn: those of one place in an epoch lie beside each other.

    Attributes:
        batch_sizes: samples of each batch of an epoch.
        train: packs of a batch.
        trainer: whose they are. It may step a schedule of its own, which it makes when there is an engine.
        engine: that waits for this schedule.
    """

    batch_size, drop_last = None, True  # for accelerate: of no fixed size, and nothing to fill up

    def __init__(self, packs: Sequence[Sequence[int]], batch_sizes: Sequence[int], processes: int, micro: int) -> None:
        self.batch_sizes, self.train = list(batch_sizes), len(packs) // len(batch_sizes)
        self.trainer: Any = None
        self.engine: Any = None
        rows = range(0, len(packs), processes * micro)
        self._batches = [
            list(chain(*packs[row + rank : row + processes * micro : processes]))
            for row in rows
            for rank in range(processes)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class TokenSampler(Sampler[int]):
    """What ``Trainer._get_train_sampler`` gives in place of an order of samples; accelerate finds the batches in it."""

    def __init__(self, batches: TokenBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        return chain(*self.batches)

    def __len__(self) -> int:
        return sum(self.batches.batch_sizes)


def _lengths(dataset: Any, path: str | None, column: str) -> Sequence[int]:
    """Tokens of each sample: of ``metrics_path``, of a column, or of ``input_ids``.

    Raises:
        ConfigError: nothing says them.
    """
    from ds_hf.engine.parallel.budgets import lengths_of

    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"dynamic_batching puts samples together by their lengths, and {type(dataset).__name__} has none before it "
            "is read: give a data set with __len__ and __getitem__, or disable dynamic_batching",
            POINTER,
        )
    if path is not None:
        return lengths_of(path, len(dataset))
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(each) for each in dataset[column]]
    rows = (dataset[index] for index in range(len(dataset)))
    try:
        return [len(row["input_ids"]) for row in rows]
    except (KeyError, TypeError, IndexError):
        raise ConfigError(
            "dynamic_batching needs the length of each sample, and samples have no input_ids to count: give "
            f'"metrics_path" (a .npy file of lengths, or what DataAnalyzer wrote), or a column {column!r}',
            f"{POINTER}/metrics_path",
        ) from None


def _batches(settings: Config, dataset: Any, column: str, *, processes: int, micro: int, steps: int) -> TokenBatches:
    from ds_hf.engine.parallel.budgets import packs_of

    lengths = _lengths(dataset, settings.data_efficiency.data_sampling.dynamic_batching.metrics_path, column)
    packs, sizes = packs_of(settings, lengths, processes * micro * steps, logs=True)
    return TokenBatches(packs, sizes, processes, micro)


# -- the Trainer ------------------------------------------------------------------------------------------------------


def sampler_of(settings: Config, trainer: Any, dataset: Any) -> TokenSampler:
    """What the Trainer's loader is made of.

    Raises:
        ConfigError: something else chooses the samples of a batch, or lengths are not known.
    """
    args = trainer.args
    strategy = args.train_sampling_strategy
    rivals = {
        f"train_sampling_strategy={strategy!r} makes batches by lengths as well": strategy
        in ("group_by_length", "batch_rebalance"),
        "train_sampling_strategy='sequential' takes samples as they come, and sequence_picking_order does not": strategy
        == "sequential"
        and settings.data_efficiency.data_sampling.dynamic_batching.sequence_picking_order != "dataloader",
        "packing=True has put samples together already, into rows of one length": getattr(args, "packing", False),
    }
    for rival, there in rivals.items():
        if there:
            raise ConfigError(f"{rival}: remove it, or disable dynamic_batching", POINTER)
    if trainer.get_sp_size() > 1:
        raise ConfigError(
            "the processes that divide sequences take each other's batches in turn, which would mix the samples of "
            "several steps: disable dynamic_batching, or take no sequence-parallel size",
            POINTER,
        )
    micro, steps = trainer._train_batch_size, args.gradient_accumulation_steps
    shared = (settings.tensor_parallel.autotp_size or 1) if trainer.get_tp_size() == 1 else 1
    processes = trainer.get_total_train_batch_size(args) // (micro * steps * shared)
    found = _batches(settings, dataset, args.length_column_name, processes=processes, micro=micro, steps=steps)
    found.trainer = trainer
    return TokenSampler(found)


def follow_schedule(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    """Hook of ``Trainer.create_scheduler``: what the Trainer steps itself follows the batches."""
    made = wrapped(*args, **kwargs)
    for batches in filter(None, map(batches_in, trainer.accelerator._dataloaders)):
        if batches.trainer is trainer and batches.engine is not None:
            from ds_hf.engine.parallel.budgets import follow_sizes

            trainer.lr_scheduler = made = follow_sizes(batches.engine, batches, trainer.lr_scheduler)
            batches.engine = None
    return made


def check_trainer(trainer: Any, loader: Any) -> None:
    """Before the first step: a Trainer that makes a loader of its own.

    Raises:
        ConfigError: budgets of tokens would be without effect.
    """
    if batches_in(loader) is not None:
        return
    dataset = type(trainer.train_dataset).__name__
    why = f"{type(trainer).__name__} makes its batches itself"
    if not hasattr(trainer.train_dataset, "__len__"):
        why = f"{dataset} has no lengths before it is read"
    raise ConfigError(f"dynamic_batching has no effect: {why}. Disable it, or give other data", POINTER)


# -- accelerate -------------------------------------------------------------------------------------------------------


def batches_in(loader: Any) -> TokenBatches | None:
    """Those that a loader takes, however accelerate has wrapped it."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, TokenBatches):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def with_batches(accelerator: Any, loader: Any) -> Any:
    """``loader``, which is about to be prepared: with batches of a budget if it is one for training, which shuffles.
    One of samples that metrics should have chosen is told; one whose metrics have chosen them gives all processes' to
    accelerate, which deals them out.

    Raises:
        ConfigError: accelerate would put batches together or take them apart, or lengths are not known.
    """
    chosen = getattr(loader, "batch_sampler", None)
    if isinstance(chosen, DeepSpeedDataSampler):
        chosen.give_all()
        return loader
    sampler = getattr(loader, "sampler", None)
    streamed = isinstance(getattr(loader, "dataset", None), IterableDataset)
    own = isinstance(sampler, (TokenSampler, RandomSampler))
    if not (own or streamed) or getattr(loader, "_is_accelerate_prepared", False):
        return loader
    settings = _settings(accelerator)
    if settings is not None and settings.data_efficiency.samples_by_metrics:
        warn_once(
            f"metrics choose no samples of a DataLoader of {type(loader.dataset).__name__}: if it is for training, "
            "give it batch_sampler=DeepSpeedDataSampler(...), or take the loader of engine.deepspeed_io(dataset)"
        )
    if not own or settings is None or not settings.data_efficiency.batches_by_tokens:
        return loader
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name, None):
            raise ConfigError(
                f"{name} divides a batch by samples among processes, and dynamic_batching by tokens: set one of them "
                "to false",
                POINTER,
            )
    if isinstance(sampler, TokenSampler):
        found = sampler.batches
    else:
        sizes = accelerator.parallelism_config
        if sizes is not None and getattr(sizes, "sp_size", 1) > 1:
            raise ConfigError("dynamic_batching and divided sequences do not go together: disable one of them", POINTER)
        processes = accelerator.num_processes // (settings.tensor_parallel.autotp_size or 1)
        micro, steps = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
        found = _batches(
            settings,
            loader.dataset,
            "length",
            processes=processes,
            micro=micro or loader.batch_size,
            steps=steps or accelerator.gradient_accumulation_steps,
        )
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch_sampler=found, **options)


def follow_batches(accelerator: Any, prepared: Any) -> None:
    """There is an engine now: its rates, or those of a schedule that the loop steps, follow the batches.

    Args:
        prepared: what ``accelerator.prepare`` returns.

    Raises:
        ConfigError: no loader has such batches, or they were made for another batch.
    """
    engine = next((each for each in prepared if hasattr(each, "step_hooks")), None)
    if engine is None or not engine.settings.data_efficiency.batches_by_tokens or engine.optimizer is None:
        return
    found = [batches for loader in accelerator._dataloaders if (batches := batches_in(loader)) is not None]
    if not found:
        raise ConfigError(
            "dynamic_batching makes the batches of a loader that shuffles, and none has been prepared: give "
            "accelerator.prepare() the training DataLoader (shuffle=True) with the model or before it",
            POINTER,
        )
    batches = found[-1]
    if batches.train != engine.batch.train:
        raise ConfigError(
            f"batches of {batches.train} packs were made, and train_batch_size is {engine.batch.train}: give numbers "
            "for train_micro_batch_size_per_gpu and gradient_accumulation_steps",
            POINTER,
        )
    from ds_hf.engine.parallel.budgets import follow_sizes

    holders = [each for each in prepared if hasattr(each, "scheduler") and hasattr(each, "step")]
    if engine.lr_scheduler is not None:
        engine.lr_scheduler = follower = follow_sizes(engine, batches)
        for holder in holders:
            holder.scheduler = follower
    elif holders:
        holders[0].scheduler = follow_sizes(engine, batches, holders[0].scheduler)
    elif batches.trainer is not None:
        batches.engine = engine
    else:
        engine.lr_scheduler = follow_sizes(engine, batches)


def _settings(accelerator: Any) -> Config | None:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "deepspeed_config", None)
    if not isinstance(config, dict) or "data_efficiency" not in config:
        return None
    return load_config(config, allow_auto=True, check_batch=False)
