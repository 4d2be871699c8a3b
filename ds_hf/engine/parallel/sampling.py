"""Loaders of an engine: that of ``data``, or one whose batches metrics choose (``curriculum_metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ds_hf.config.types import Config
from ds_hf.data.sampler import DeepSpeedDataSampler
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = ["SampledLoader", "sampled_loader"]


class SampledLoader(DataLoader[Any]):
    """One rank's micro-batches of a sampler; ``iter()`` begins where a loaded state stood, or where the last one ended.

    Attributes:
        data_sampler: gives them, from the first on.
        post_process_func: makes of a batch and the sampler's state what is handed out.
    """

    def __init__(self, dataset: Dataset[Any], sampler: DeepSpeedDataSampler, **options: Any) -> None:
        # An own generator: torch would otherwise draw the workers' seed from the global one, and change the run.
        super().__init__(dataset, batch_sampler=sampler, generator=torch.Generator(), **options)
        self.data_sampler = sampler
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self._taken = 0
        self._loaded: dict[str, Any] | None = None  # the state, until a batch is taken

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.data_sampler
        sampler.go_to(self._taken, sampler.drawn)
        for batch in super().__iter__():
            self._taken += sampler.micro * sampler.processes
            self._loaded = None
            yield batch if self.post_process_func is None else self.post_process_func(batch, sampler.state_dict())

    def __len__(self) -> int:
        sampler = self.data_sampler
        return sampler.total_samples // (sampler.micro * sampler.processes) + 1

    def state_dict(self) -> dict[str, Any]:
        """The samples that all ranks together have taken, and in which batches they were drawn."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {"epoch": 0, "samples": self._taken, "seed": self.data_sampler.draws.seed, **self.data_sampler.sizes()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue where ``state`` was taken."""
        sampler, self._taken, self._loaded = self.data_sampler, state["samples"], dict(state)
        sampler.drawn = sampler.drawn_before(state, self._taken)
        size, now = state.get("global_batch", sampler.global_batch_size), sampler.global_batch_size
        if size != now:
            warn_once(
                f"the checkpoint was written with batches of {size} samples, and they have {now} now: "
                "samples are drawn as before up to this step, and others from here on"
            )


def sampled_loader(
    settings: Config,
    mesh: Mesh,
    batch: BatchSizes,
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> SampledLoader:
    """A loader of this rank's micro-batches from ``dataset``, as the configuration's metrics choose them.

    Raises:
        ConfigError: files of metrics are not of this data set, or it has no length.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"metrics choose among samples by their numbers, and {type(dataset).__name__} has none: give a data set "
            "with __len__ and __getitem__, or disable curriculum_learning",
            "/data_efficiency/data_sampling/curriculum_learning",
        )
    section = settings.data_efficiency.data_sampling
    sampler = DeepSpeedDataSampler(
        settings.resolved["data_efficiency"],
        len(dataset),
        batch.micro,
        mesh.sample_rank,
        mesh.shape.data,
        gradient_accumulation_steps=batch.accumulation_steps,
        drop_last=settings.dataloader_drop_last,
    )
    return SampledLoader(
        dataset,
        sampler,
        collate_fn=collate_fn,
        num_workers=section.num_workers,
        pin_memory=section.pin_memory and torch.cuda.is_available(),
    )
