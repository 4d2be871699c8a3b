"""The Trainer's samples where metrics or a budget of tokens choose them: in one row, which accelerate deals out.
Batches of equal cost, which transformers deals out itself, and what workers draw are the same in processes that share
layers."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

from ds_hf.errors import ConfigError
from ds_hf.hf.loss import Args, Kwargs, Wrapped
from ds_hf.log import warn_once

__all__ = ["check_batches", "draw_alike", "sample_by_metrics", "tell_of_unequal_loaders"]


def sample_by_metrics(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Hook of ``Trainer._get_train_sampler``.

    Raises:
        ConfigError: files of metrics are not of this data set, or a schedule has no numbers.
    """
    settings = _settings(trainer)
    if settings is not None and settings.data_efficiency.batches_by_tokens:
        from ds_hf.hf.token_batches import sampler_of

        return sampler_of(settings, trainer, _dataset(trainer, args, kwargs))
    if settings is None or not settings.data_efficiency.samples_by_metrics:
        return _dealt_by_samples(trainer, wrapped(*args, **kwargs))
    section = settings.resolved["data_efficiency"]
    from ds_hf.data.sampler import ClusterDraws, EpochSampler

    dataset = _dataset(trainer, args, kwargs)
    _require_numbers(dataset)
    for name, metric in section["data_sampling"]["curriculum_learning"]["curriculum_metrics"].items():
        if metric.get("schedule_type") == "custom":
            raise ConfigError(
                f'the schedule of {name} is "custom", and the Trainer\'s samples are chosen before there is an engine '
                "that could be given its function: take fixed_discrete with the same numbers",
                name,
            )
    if trainer.args.train_sampling_strategy != "random":
        warn_once(
            f"train_sampling_strategy={trainer.args.train_sampling_strategy!r} has no effect: metrics choose samples"
        )
    return EpochSampler(ClusterDraws(section, len(dataset), trainer.get_total_train_batch_size(trainer.args)))


def _require_numbers(dataset: Any) -> None:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"metrics choose among samples by their numbers, and {type(dataset).__name__} has none: give a data set "
            "with a length, or disable curriculum_learning",
            "/data_efficiency/data_sampling/curriculum_learning",
        )


def _dealt_by_samples(trainer: Any, sampler: Any) -> Any:
    """``sampler``; if it makes batches of equal cost, for processes that read different samples, and not for all.

    Raises:
        ConfigError: processes divide sequences.
    """
    if _file(trainer) is None or type(sampler).__name__ != "BatchRebalanceSampler":
        return sampler
    if trainer.get_sp_size() > 1:
        raise ConfigError(
            "the processes that divide sequences take each other's batches in turn, and train_sampling_strategy="
            "'batch_rebalance' gives each its part of a step: some steps would have the long samples alone. Take "
            "another train_sampling_strategy, or no sequence-parallel size",
            "sequence_parallel_size",
        )
    if (shared := _sharing_layers(trainer)) == 1:
        return sampler
    return type(sampler)(
        sampler.lengths,
        sampler.effective_batch_size // shared,
        sampler.dp_size // shared,
        sampler.grad_accum,
        sampler.shuffle,
        sampler.seed,
        sampler.rank // shared,
        sampler.drop_last,
    )


def draw_alike(trainer: Any, loader: Any) -> None:
    """Before the first step: what workers draw (a collator's masks, a data set's crops) is the same in processes that
    share layers; transformers seeds them by the number of the process."""
    loader = getattr(loader, "base_dataloader", loader)
    seeds = getattr(loader, "worker_init_fn", None)
    if isinstance(seeds, partial) and "rank" in seeds.keywords and (shared := _sharing_layers(trainer)) > 1:
        loader.worker_init_fn = partial(seeds, rank=trainer.args.process_index // shared)


def check_batches(trainer: Any, loader: Any) -> None:
    """Before the first step.

    Raises:
        ConfigError: batches were to have a budget of tokens, and have not; or metrics were to choose samples, and the
            data set is a stream, of which transformers asks for no sampler.
    """
    settings = _settings(trainer)
    if settings is not None and settings.data_efficiency.samples_by_metrics:
        _require_numbers(trainer.train_dataset)
    if settings is not None and settings.data_efficiency.batches_by_tokens:
        from ds_hf.hf.token_batches import check_trainer

        check_trainer(trainer, loader)


def tell_of_unequal_loaders(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Hook of ``Trainer._get_dataloader``: with accelerate's ``even_batches=False`` some processes have a batch less
    than others, which wait for them, in training and in the Trainer's evaluation; without DeepSpeed too, silently."""
    loader = wrapped(*args, **kwargs)
    dealt: Any = getattr(loader, "batch_sampler", None)
    if _file(trainer) is None or type(dealt).__name__ != "BatchSamplerShard" or dealt.even_batches:
        return loader
    lengths = []
    with suppress(TypeError, NotImplementedError):  # a sampler of the script's without a length
        for process in range(dealt.num_processes):
            each = copy(dealt)
            each.process_index = process
            lengths.append(len(each))
    if len(set(lengths)) > 1:  # the last processes have fewer
        warn_once(
            f"even_batches=False: the first process has {lengths[0]} batch(es), the last {lengths[-1]}, and each step "
            "and each gathering of an evaluation waits for all processes. This run will stand still where the shorter "
            "one ends, until ds_hf.hang_timeout tells where. Leave even_batches out of accelerator_config, or set "
            "dataloader_drop_last"
        )
    return loader


def _sharing_layers(trainer: Any) -> int:
    """How many processes share each layer, and so read the same samples."""
    section = (_file(trainer) or {}).get("tensor_parallel") or {}
    return max(int(trainer.get_tp_size()), int(section.get("autotp_size") or 1))


def _file(trainer: Any) -> Any:
    plugin = getattr(trainer.args, "deepspeed_plugin", None) if trainer.is_deepspeed_enabled else None
    return None if plugin is None else plugin.hf_ds_config.config


def _dataset(trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    given = args[0] if args else kwargs.get("train_dataset")
    return trainer.train_dataset if given is None else given


def _settings(trainer: Any) -> Any:
    """The configuration, if the Trainer's file says something of data."""
    file = _file(trainer)
    if file is None or "data_efficiency" not in file:
        return None
    from ds_hf.config.load import load_config

    return load_config(file, allow_auto=True, check_batch=False)
