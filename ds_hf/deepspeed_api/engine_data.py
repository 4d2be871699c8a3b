"""Data efficiency of an engine under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.modules.decoder_blocks import find_blocks
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

if TYPE_CHECKING:
    from ds_hf.data.difficulty import CurriculumScheduler
    from ds_hf.data.token_schedule import RandomLTDScheduler

__all__ = ["DataNames", "tell_loaders"]


class DataNames(CoreEngine):
    """A part of ``Engine``."""

    def data_efficiency_enabled(self) -> bool:
        return self.settings.data_efficiency.enabled

    def data_efficiency_config(self) -> dict[str, Any]:
        return _written(self, "data_efficiency")

    def data_sampling_enabled(self) -> bool:
        return self.settings.data_efficiency.data_sampling.enabled

    def data_sampling_config(self) -> dict[str, Any]:
        return _written(self, "data_efficiency", "data_sampling")

    def curriculum_learning_enabled(self) -> bool:
        return self.settings.data_efficiency.data_sampling.curriculum_learning.enabled

    def curriculum_learning_config(self) -> dict[str, Any]:
        return _written(self, "data_efficiency", "data_sampling", "curriculum_learning")

    def curriculum_enabled_legacy(self) -> bool:
        return self.settings.curriculum_learning.enabled

    def curriculum_params_legacy(self) -> dict[str, Any]:
        return _written(self, "curriculum_learning")

    def pld_enabled(self) -> bool:
        return self.settings.progressive_layer_drop.enabled

    def pld_params(self) -> dict[str, Any] | bool:
        return _written(self, "progressive_layer_drop") if self.pld_enabled() else False

    def pld_theta(self) -> float:
        return self.settings.progressive_layer_drop.theta

    def pld_gamma(self) -> float:
        return self.settings.progressive_layer_drop.gamma

    def get_pld_theta(self) -> float | None:
        """Of the present step; ``None`` where nothing is left out."""
        drop = self.kept.get("progressive_layer_drop")
        return None if drop is None else float(drop.schedule.get_theta())

    def random_ltd_enabled(self) -> bool:
        return self.settings.data_efficiency.data_routing.random_ltd.enabled

    def random_ltd_config(self) -> dict[str, Any]:
        return _written(self, "data_efficiency", "data_routing", "random_ltd")

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """What says how many tokens are kept, ``None`` where none are dropped."""
        found = self.kept.get("random_ltd")
        return None if found is None else found.scheduler

    def random_ltd_initialize(self, convert_type: type | None = None) -> None:
        """Let the blocks of this class be those that ``random_ltd_layer_id`` names; without one they stay what
        ``initialize`` found.

        Raises:
            ConfigError: there are too few of them, or the configuration drops no tokens.
        """
        found = self.kept.get("random_ltd")
        if found is None:
            raise ConfigError("no tokens are dropped: enable data_efficiency.data_routing.random_ltd", "random_ltd")
        if convert_type is not None:
            found.name_blocks(find_blocks(self.module, "random_ltd", kind=convert_type))

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """What gives the length of a step, ``None`` without a curriculum by length."""
        found = self.kept.get("curriculum")
        return None if found is None else found.scheduler

    def cut_to_curriculum(self, batch: Any) -> Any:
        """``batch`` as the coming step has it, whose sequences a curriculum by length cuts; else the same object.

        The model's own call is cut without this: it is for a loss of one's own, and for counts of tokens.
        """
        found = self.kept.get("curriculum")
        return batch if found is None else found.cut(batch)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], Any]]) -> None:
        """Functions from a step (the first is 1) to a difficulty, by the names of metrics whose schedule is "custom".

        The metric of the older section is called seqlen.
        """
        sampler = getattr(self.training_dataloader, "data_sampler", None)
        if sampler is not None:
            sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)
        found = self.kept.get("curriculum")
        if found is None and sampler is None:
            warn_once("set_custom_curriculum_learning_schedule() has no effect: the configuration has no curriculum")
        if found is not None:
            found.set_custom(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """What makes of each batch, and the state of the sampler that chose it, what the engine's loader hands out."""
        if not hasattr(self.training_dataloader, "post_process_func"):
            raise ConfigError("there is no loader of training_data whose samples metrics choose", "curriculum_learning")
        self.training_dataloader.post_process_func = post_process_func


def tell_loaders(engine: CoreEngine) -> None:
    """The engine's batch has changed: what goes on with the configuration's, as in DeepSpeed."""
    made, now, loader = BatchSizes.of(engine.settings), engine.batch, engine.training_dataloader
    if loader is not None and now.micro != made.micro:
        warn_once(
            f"the loader of training_data goes on with micro-batches of {made.micro} samples, as in DeepSpeed: take "
            f"those of {now.micro} from engine.deepspeed_io(dataset, batch_size={now.micro})"
        )
    if now.train == made.train:
        return
    if "dynamic_batching" in engine.kept:
        warn_once(
            f"dynamic_batching scales the rate of each step by the samples of a batch of {made.train} packs, and steps "
            f"take {now.train} now: these rates are of other batches. Change train_batch_size in the configuration"
        )
    elif getattr(loader, "data_sampler", None) is not None:
        warn_once(
            f"metrics go on drawing {made.train} samples at each difficulty, as in DeepSpeed, and steps take "
            f"{now.train} now: difficulties rise by what is drawn, not by steps"
        )


def _written(engine: CoreEngine, *path: str) -> dict[str, Any]:
    """A section as the file has it."""
    found: Any = engine.settings.resolved
    for key in path:
        found = found.get(key) or {}
    return dict(found)
