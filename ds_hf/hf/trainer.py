"""Hooks on ``Trainer``: what it refuses under DeepSpeed though ds_hf can do it, and what it does not know to log.

- ``auto_find_batch_size`` at every stage: the configuration follows the batch size that is being tried, and a process
  that runs out of memory does not leave the others waiting.
- ``save_only_model`` with ``load_best_model_at_end``: the weights alone are loaded.
- ``train()`` again on the same Trainer, ``evaluate()`` without ``train()``: see also ``hf.integration``.
- steps that were skipped for gradients that are not finite are in the logs, as ``skipped_steps``.

Without DeepSpeed every hook only calls what it wraps, and the engine is never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from ds_hf.engine.engine import Engine

__all__ = ["wrap_trainer"]

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def wrap_trainer(module: ModuleType) -> None:
    """Hook of ``transformers.trainer``."""
    hooks = {
        "create_accelerator_and_postprocess": _lift_refusals,
        "_update_auto_batch_size": _tell_batch_size,
        "_prepare_for_training": _forget_destroyed_engine,
        "training_step": _fail_together,
        "_load_best_model": _load_weights_alone,
        "log": _log_skipped_steps,
    }
    for name, hook in hooks.items():
        wrapt.wrap_function_wrapper(module, f"Trainer.{name}", hook)


def _engine(trainer: Any) -> Engine | None:
    """The engine that trains now."""
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return None
    from ds_hf.engine.engine import Engine

    return engine if isinstance(engine, Engine) else None


@contextmanager
def _with(target: Any, **values: Any) -> Iterator[None]:
    """Attributes of ``target`` have these values inside."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _lift_refusals(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The Trainer refuses two combinations under DeepSpeed, here; nothing else in this method reads the two flags."""
    if trainer.args.deepspeed_plugin is None:
        return wrapped(*args, **kwargs)
    with _with(trainer.args, auto_find_batch_size=False, save_only_model=False):
        return wrapped(*args, **kwargs)


def _tell_batch_size(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> None:
    """The size being tried into the configuration: "auto" was filled in when the first one was."""
    wrapped(*args, **kwargs)
    if trainer.is_deepspeed_enabled:
        config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
        steps = trainer.args.gradient_accumulation_steps
        config["train_micro_batch_size_per_gpu"] = trainer._train_batch_size
        config["train_batch_size"] = trainer._train_batch_size * steps * trainer.args.world_size


def _forget_destroyed_engine(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """``train()`` starts with ``free_memory()``: the engine of an earlier ``train()`` is gone, but still kept."""
    engine = _engine(trainer)
    if engine is not None and engine.destroyed and trainer.model_wrapped is engine:
        trainer.model_wrapped = trainer.model
        trainer.deepspeed = None
    return wrapped(*args, **kwargs)


def _fail_together(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    engine = _engine(trainer)
    if engine is None or not trainer.args.auto_find_batch_size:
        return wrapped(*args, **kwargs)
    from accelerate.utils.memory import should_reduce_batch_size

    from ds_hf.engine.dist.memory import shared_out_of_memory

    with shared_out_of_memory(engine.axis, should_reduce_batch_size):
        return wrapped(*args, **kwargs)


def _load_weights_alone(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A checkpoint of ``save_only_model`` is loaded as without DeepSpeed, into the shards."""
    engine = _engine(trainer)
    if engine is None or any(Path(trainer.state.best_model_checkpoint).glob("global_step*")):
        return wrapped(*args, **kwargs)
    from ds_hf.engine.zero.loading import loadable

    with _with(trainer, is_deepspeed_enabled=False), loadable(engine.units):
        return wrapped(*args, **kwargs)


def _log_skipped_steps(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Once a step was skipped, every training log says how many were so far."""
    logs = args[0] if args else kwargs["logs"]
    engine = _engine(trainer)
    if engine is not None and engine.skipped_steps and "loss" in logs:
        logs.setdefault("skipped_steps", engine.skipped_steps)
    return wrapped(*args, **kwargs)
