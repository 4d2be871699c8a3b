"""``deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ds_hf.data.batching import VariableBatchSizeLR, batch_by_seqlens, scale_lr
from ds_hf.deepspeed_api.engine import Engine
from ds_hf.engine.parallel.budgets import BudgetLoader, budget_loader, follow_sizes
from ds_hf.errors import ConfigError

__all__ = [
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "lr_scheduler_for_variable_batch_size",
    "scale_lr",
]


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Scale the rates of a schedule, or of an optimizer, by the sizes of batches."""
    given = lr_scheduler_or_optimizer, base_batch_size, batch_sizes, dataloader, lr_scaling_method
    return VariableBatchSizeLR(*given, verbose=verbose)


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Engine,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[..., Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[BudgetLoader, Any, dict[str, Any]]:
    """A loader of batches with a budget of tokens, and the schedule of an engine that follows their sizes.

    Args:
        dataset_seqlens: tokens of each sample; by default those that ``metrics_path`` has.
        dataset_filter_ids: the samples to take.
        sample_padding_fn: for pipelines alone, which cannot have such batches here.
        batch_seqlens_fn: from a batch to the tokens of its samples, for files that are not there yet.

    Returns:
        loader, schedule (the engine steps it if it is made its ``lr_scheduler``), and no arguments of ``deepspeed_io``.

    Raises:
        ConfigError: the configuration has no ``dynamic_batching``, or lengths do not fit.
    """
    if not engine.settings.data_efficiency.batches_by_tokens:
        raise ConfigError("dynamic_batching is not enabled in data_efficiency.data_sampling", "dynamic_batching")
    if dataset_seqlens is None and batch_seqlens_fn is not None:
        whole = [dataset[index] for index in range(len(dataset))]
        collate = dataloader_collate_fn or (lambda rows: rows)
        dataset_seqlens = [int(each) for row in whole for each in batch_seqlens_fn(collate([row]))]
    loader = budget_loader(
        engine.settings,
        engine.mesh,
        engine.batch,
        dataset,
        dataloader_collate_fn,
        lengths=dataset_seqlens,
        samples=dataset_filter_ids,
    )
    return loader, follow_sizes(engine, loader), {}
