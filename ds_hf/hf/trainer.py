"""Hooks on ``Trainer``: what it refuses under DeepSpeed though ds_hf can do it, and what it does not know to log.

- ``auto_find_batch_size`` at every stage: the configuration follows the batch size that is being tried, and a process
  that runs out of memory does not leave the others waiting.
- ``save_only_model`` with ``load_best_model_at_end``: the weights alone are loaded.
- checkpoints that are written in the background: ``save_total_limit`` removes none before a later one is on disk,
  ``train()`` returns when the last one is, and none is uploaded before it is.
- what it resumes from is whole, and of one save: see ``hf.resuming``.
- ``save_model()`` before there is an engine; ``get_num_trainable_parameters()`` of parameters at rest and of
  parts; tokens, operations and predictions of processes that share layers, which have the same samples.
- ``train()`` again on the same Trainer, ``evaluate()`` without ``train()``: see also ``hf.integration``.
- training that was started again after a failure (``--max_restarts``) resumes: see ``hf.restart``.
- a Trainer that is only measured (``ds-hf lr-find``, ``ds-hf autotune``) writes no checkpoints on its way.
- a report that the engine records (``ds_hf.report``) is in the logs, and ends training with a paragraph.
- steps that were skipped for gradients that are not finite are in the logs, as ``skipped_steps``.
- samples that metrics choose, batches of a budget of tokens, and loaders of unequal lengths: see ``hf.sampling``.
- what becomes of the model's loss: see ``hf.loss``.

Without DeepSpeed every hook only calls what it wraps, and the engine is never imported.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt
from torch.optim.lr_scheduler import LRScheduler

from ds_hf.hf.autoload import wrap
from ds_hf.hf.loss import Args, Kwargs, Wrapped, engine_of, prepare_loss, with_values, wrap_loss
from ds_hf.hf.restart import go_on_after_restart
from ds_hf.hf.resuming import check_resumed, compare_with_engine, keep_random_states, pass_over_unfinished, unfinished
from ds_hf.hf.sampling import check_batches, draw_alike, sample_by_metrics, tell_of_unequal_loaders
from ds_hf.hf.token_batches import follow_schedule
from ds_hf.log import warn_once
from ds_hf.measure.saving import being_measured

if TYPE_CHECKING:
    from ds_hf.deepspeed_api.engine import Engine

__all__ = ["wrap_trainer", "wrap_trainer_utils"]

RATE = "_ds_hf_rate"  # where the Trainer keeps its step and the learning rate before it


def wrap_trainer(module: ModuleType) -> None:
    """Hook of ``transformers.trainer``."""
    hooks = {
        "train": _train,
        "create_accelerator_and_postprocess": _lift_refusals,
        "_update_auto_batch_size": _tell_batch_size,
        "_prepare_for_training": _forget_destroyed_engine,
        "training_step": _fail_together,
        "_get_learning_rate": _rate_of_the_step,
        "_load_best_model": _load_weights_alone,
        "_load_optimizer_and_scheduler": compare_with_engine,
        "_maybe_log_save_evaluate": _evaluate_what_is_saved,
        "_save_checkpoint": _prune_later,
        "_push_from_checkpoint": _push_when_written,
        "_get_train_sampler": sample_by_metrics,
        "_get_dataloader": tell_of_unequal_loaders,
        "create_scheduler": follow_schedule,
        "log": _log_skipped_steps,
        "save_model": _save_without_engine,
        "get_num_trainable_parameters": _count_trainable,
        "_track_num_input_tokens": _count_tokens_once,
        "floating_point_ops": _count_operations_once,
        "evaluation_loop": _take_samples_once,
    }
    for name, hook in hooks.items():
        wrap(module, f"Trainer.{name}", hook)
    wrap(module, "Trainer._finalize_training", _finish_saving)
    wrap(module, "deepspeed_load_checkpoint", keep_random_states)
    wrap_loss(module)
    if not isinstance(module.get_last_checkpoint, wrapt.FunctionWrapper):  # it was imported before the hook below
        wrap_trainer_utils(module)


def wrap_trainer_utils(module: ModuleType) -> None:
    """Hook of ``transformers.trainer_utils``, from which scripts take what looks for the last checkpoint."""
    wrap(module, "get_last_checkpoint", pass_over_unfinished)


def _train(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = check_resumed(trainer, args[0] if args else kwargs.pop("resume_from_checkpoint", None))
        return wrapped(given, *args[1:], **kwargs)

    return go_on_after_restart(checked, trainer, args, kwargs)


def _lift_refusals(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The Trainer refuses two combinations under DeepSpeed, here; nothing else in this method reads the two flags."""
    if trainer.args.deepspeed_plugin is None:
        return wrapped(*args, **kwargs)
    with with_values(trainer.args, auto_find_batch_size=False, save_only_model=False):
        return wrapped(*args, **kwargs)


def _tell_batch_size(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> None:
    """The size being tried into the configuration: "auto" was filled in when the first one was."""
    engine = engine_of(trainer)
    if engine is not None and engine.destroyed and engine.global_steps:
        warn_once(
            f"out of memory after {engine.global_steps} steps: auto_find_batch_size begins anew from the weights that "
            "they made, and transformers makes a new optimizer under DeepSpeed, without the moments and steps with "
            "which the Trainer alone goes on. To begin from the first weights, start with the size that is found",
            about="moments of batch sizes that were tried",
        )
    wrapped(*args, **kwargs)
    if trainer.is_deepspeed_enabled:
        config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
        config["train_micro_batch_size_per_gpu"] = trainer._train_batch_size
        config["train_batch_size"] = trainer.get_total_train_batch_size(trainer.args)


def _forget_destroyed_engine(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """``train()`` starts with ``free_memory()``: the engine of an earlier ``train()`` is gone, but still kept."""
    engine = engine_of(trainer)
    if engine is not None and engine.destroyed and trainer.model_wrapped is engine:
        trainer.model_wrapped = trainer.model
        trainer.deepspeed = None
        if engine.global_steps and (args[2] if len(args) > 2 else kwargs["resume_from_checkpoint"]) is None:
            warn_once(
                "train() is called again: transformers makes a new optimizer under DeepSpeed, without the moments and "
                "steps of the first call's, with which the Trainer alone goes on. To go on with them, save a "
                "checkpoint at its end (save_strategy) and call train(resume_from_checkpoint=...)"
            )
    loader = args[1] if len(args) > 1 else kwargs["train_dataloader"]
    check_batches(trainer, loader)
    draw_alike(trainer, loader)
    prepared = wrapped(*args, **kwargs)
    prepare_loss(trainer, prepared[1])
    if (engine := engine_of(trainer)) is not None and "_ds_report" in vars(engine):
        from ds_hf.hf.report import add_report_callback

        add_report_callback(trainer)
    return prepared


def _fail_together(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    engine = engine_of(trainer)
    if engine is not None and isinstance(engine.lr_scheduler, LRScheduler):
        trainer.__dict__[RATE] = trainer.state.global_step, trainer._get_learning_rate()
    if engine is None or not trainer.args.auto_find_batch_size:
        return wrapped(*args, **kwargs)
    from accelerate.utils.memory import should_reduce_batch_size

    from ds_hf.engine.comm.memory import shared_out_of_memory

    with shared_out_of_memory(engine.mesh, should_reduce_batch_size):
        return wrapped(*args, **kwargs)


def _rate_of_the_step(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Before the Trainer has counted a step, the rate that this step had: with an optimizer of the configuration the
    engine has advanced transformers' schedule by then. DeepSpeed's own begin a step later and agree as they are."""
    step, rate = trainer.__dict__.get(RATE, (None, None))
    return rate if step == trainer.state.global_step and engine_of(trainer) is not None else wrapped(*args, **kwargs)


def _load_weights_alone(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A checkpoint of ``save_only_model`` is loaded as without DeepSpeed, into the shards."""
    engine = engine_of(trainer)
    if engine is None or any(Path(trainer.state.best_model_checkpoint).glob("global_step*")):
        return wrapped(*args, **kwargs)
    from ds_hf.engine.zero.loading import loadable

    with with_values(trainer, is_deepspeed_enabled=False), loadable(engine.units):
        return wrapped(*args, **kwargs)


def _writing_engine(trainer: Any) -> Engine | None:
    """The engine, if it writes the Trainer's checkpoints in the background."""
    engine = engine_of(trainer)
    if engine is None or engine.destroyed or trainer.args.save_only_model:
        return None
    return engine if engine.settings.ds_hf.checkpoint.async_ else None


def _prune_later(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The Trainer prunes when saving returns, before the checkpoint is on disk: here before the next one instead."""
    if being_measured():
        return None
    _make_what_waits(trainer, last=not trainer.args.save_only_model)
    engine = _writing_engine(trainer)
    if engine is None:
        return wrapped(*args, **kwargs)
    _prune_when_written(engine, trainer, args[1] if len(args) > 1 else kwargs["trial"])
    with with_values(trainer.args, save_total_limit=None):
        return wrapped(*args, **kwargs)


def _finish_saving(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Training ends: before what follows the last checkpoint is on disk, and updates that wait are made."""
    _make_what_waits(trainer, last=True)
    engine = _writing_engine(trainer)
    if engine is not None:
        _prune_when_written(engine, trainer, args[0] if args else kwargs["trial"])
    return wrapped(*args, **kwargs)


def _evaluate_what_is_saved(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The Trainer evaluates before it saves, and a checkpoint makes the updates that wait, as whole weights make those
    that go on: the best checkpoint would have another loss than the one it was chosen by."""
    if trainer.control.should_save and not being_measured():
        _make_what_waits(trainer, last=not trainer.args.save_only_model)
    return wrapped(*args, **kwargs)


def _make_what_waits(trainer: Any, *, last: bool) -> None:
    """Updates that are delayed, so that the Trainer's weights and the engine's checkpoint are the same; ``last``: also
    those that ZenFlow has put off."""
    engine = engine_of(trainer)
    optimizer = None if engine is None or engine.destroyed else engine.optimizer
    if optimizer is not None and optimizer.store.delays:
        optimizer.settle(last=last)


def _prune_when_written(engine: Engine, trainer: Any, trial: Any) -> None:
    """Wait for the checkpoint that is being written; it is whole and the newest, so older ones may go."""
    engine.wait_for_checkpoint()
    if engine.checkpoint_writer.completed and trainer.args.should_save:
        from transformers.trainer_utils import rotate_checkpoints

        folder = trainer._get_output_dir(trial=trial)
        for path in Path(folder).glob("checkpoint-*"):
            if path.is_dir() and unfinished(path):  # left by a killed process: it goes first, whatever its number
                os.utime(path, (0, 0))
        rotate_checkpoints(
            output_dir=folder,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


def _push_when_written(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """What goes to the Hub is whole."""
    engine = _writing_engine(trainer)
    if engine is not None:
        engine.wait_for_checkpoint()
    return wrapped(*args, **kwargs)


def _log_skipped_steps(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Once a step was skipped, every training log says how many were so far."""
    logs = args[0] if args else kwargs["logs"]
    engine = engine_of(trainer)
    if engine is not None and engine.skipped_steps and "loss" in logs:
        logs.setdefault("skipped_steps", engine.skipped_steps)
    return wrapped(*args, **kwargs)


def _save_without_engine(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Without a live engine transformers asks the bare model to save itself as an engine would: before ``train()`` and
    ``evaluate()``, and after ``redundancy_clean()``, which ends the engine."""
    if not trainer.is_deepspeed_enabled:
        return wrapped(*args, **kwargs)
    engine = engine_of(trainer)
    if trainer.deepspeed is not None and (engine is None or not engine.destroyed):
        return _save_handing_on(wrapped, trainer, args, kwargs)
    from ds_hf.engine.checkpoint.consolidate import whole_state_dict

    save, state = trainer._save, whole_state_dict(trainer.model)

    def save_whole(output_dir: str | None = None, state_dict: Any = None) -> None:
        save(output_dir, state_dict=state)

    trainer._save = save_whole
    try:
        with with_values(trainer, is_deepspeed_enabled=False):
            return wrapped(*args, **kwargs)
    finally:
        del trainer._save


def _save_handing_on(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """``_save`` of another library may drop the whole weights that it is given and let the model save itself, which has
    parts at stage 3 (sentence-transformers): the model gets them then."""
    from ds_hf.hf.modeling import whole_weights

    save, own = trainer._save, vars(trainer).get("_save")
    params = dict(trainer.model.named_parameters(remove_duplicate=False))

    def save_whole(output_dir: str | None = None, state_dict: Any = None) -> Any:
        whole = {id(params[name]): value for name, value in (state_dict or {}).items() if name in params}
        with whole_weights(whole):
            return save(output_dir, state_dict=state_dict)

    trainer._save = save_whole
    try:
        return wrapped(*args, **kwargs)
    finally:
        del trainer._save
        if own is not None:
            trainer._save = own


def _count_trainable(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> int:
    if not trainer.is_deepspeed_enabled:
        return int(wrapped(*args, **kwargs))
    from ds_hf.engine.zero.buffer import logical_shape
    from ds_hf.engine.zero.cut import whole_shape

    trained = [param for param in trainer.model.parameters() if param.requires_grad]
    return sum(whole_shape(param, logical_shape(param)).numel() for param in trained)


def _sharing(trainer: Any) -> int:
    """How many processes have the same samples, each of which the Trainer adds up."""
    engine = engine_of(trainer)
    return 1 if engine is None else int(engine.mesh.shape.tensor)


def _count_tokens_once(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> None:
    before = trainer.state.num_input_tokens_seen
    wrapped(*args, **kwargs)
    trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // _sharing(trainer)


def _take_samples_once(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """``Seq2SeqTrainer`` gathers what every process has, for metrics and predictions as well."""
    sharing, gather = _sharing(trainer), trainer.accelerator.gather
    if sharing == 1 or trainer.gather_function != gather:
        return wrapped(*args, **kwargs)
    from accelerate.utils import recursively_apply

    def first(whole: Any) -> Any:
        return whole.unflatten(0, (trainer.args.world_size // sharing, sharing, -1))[:, 0].flatten(0, 1)

    trainer.gather_function = lambda tensors: recursively_apply(first, gather(tensors))
    return wrapped(*args, **kwargs)


def _count_operations_once(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    found, sharing = wrapped(*args, **kwargs), _sharing(trainer)
    return found if sharing == 1 else found / sharing
