"""Hooks on ``transformers.integrations.deepspeed``: what ``deepspeed_init`` forgets or refuses.

- The optimizer and scheduler that were given to the Trainer: transformers drops them without a word and makes AdamW.
- Evaluation without training: transformers takes stage 3 alone for it, and throws the optimizer out of the
  configuration for good.
- The batch size: transformers counts all processes, also those that read the same samples.
- The level of ds_hf's logger, where ``log_level`` was not given: transformers sets its own default, a warning.
- Pipelines: the Trainer would speak of an empty batch.
- ``--deepspeed auto``: what it chooses is chosen before transformers reads it.
- What TRL forces on adapters at stage 3 for DeepSpeed's sake, and an engine of ds_hf does not need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from ds_hf.errors import ConfigError
from ds_hf.hf import auto
from ds_hf.hf.autoload import wrap
from ds_hf.hf.source import AUTO, fill_sizes
from ds_hf.log import log_once, logger, warn_once

__all__ = ["wrap_integration"]

SECTION = "_ds_hf_optimizer"  # where the configuration keeps its optimizer section while there is none
BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # values of --lr_scheduler_type
GIVEN = "_ds_hf_given"  # where the Trainer keeps the optimizer and scheduler that it was given


def wrap_integration(module: ModuleType) -> None:
    """Hook of ``transformers.integrations.deepspeed``."""
    auto.wrap_integration(module)
    wrap(module, "deepspeed_init", _init)
    wrap(module, "HfTrainerDeepSpeedConfig.fill_match", _match)
    wrap(module, "HfTrainerDeepSpeedConfig.trainer_config_finalize", _finalize)


def _init(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trainer = args[0] if args else kwargs["trainer"]
    _refuse_pipelines(trainer)
    hf_config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    if kwargs.get("inference", len(args) > 2 and args[2]):
        return _init_inference(lambda: wrapped(*args, **kwargs), hf_config)
    if hasattr(hf_config, SECTION):
        hf_config.config["optimizer"] = hf_config.__dict__.pop(SECTION)
    if trainer.args.deepspeed == AUTO:
        from ds_hf.hf.auto_blocks import settle_computation  # it traces the model: nothing else needs that

        steps = args[1] if len(args) > 1 else kwargs["num_training_steps"]
        auto.choose_with_model(hf_config, trainer.args, trainer.model, steps)
        settle_computation(trainer, steps)
    given, given_scheduler = _given(trainer)
    level = logger.level
    optimizer, scheduler = wrapped(*args, **kwargs)
    if trainer.args.log_level == "passive" and logger.level == logging.WARNING:
        logger.setLevel(level)
    _refuse_schedule(trainer, optimizer, hf_config)
    if given is None:
        return optimizer, scheduler
    if not isinstance(optimizer, Optimizer):  # a placeholder: the configuration names one
        warn_once(f"the {type(given).__name__} given to the Trainer is not used: the configuration has an optimizer")
        return optimizer, scheduler
    trainer.optimizer = given
    return given, scheduler if scheduler is not None else given_scheduler


def _refuse_schedule(trainer: Any, optimizer: Any, hf_config: Any) -> None:
    """One that goes by a metric, beside an optimizer of the configuration: the engine steps what it makes itself."""
    kind = getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type)
    if kind not in BY_METRIC or isinstance(optimizer, Optimizer) or "scheduler" in hf_config.config:
        return
    raise ConfigError(
        f"--lr_scheduler_type {kind} needs a metric at each step, and the engine, which has none, steps the schedule "
        'where the file has an "optimizer". Remove "optimizer" from the file: the Trainer makes it by --optim, and '
        "steps the schedule itself",
        "/optimizer",
    )


def _refuse_pipelines(trainer: Any) -> None:
    """Its loop calls the model, and a pipeline takes whole steps."""
    from ds_hf.engine.parallel.pipeline.module import StageModule

    if isinstance(trainer.model, StageModule):
        raise ConfigError(
            "the Trainer trains no pipelines: it calls the model, of which each process has one stage. Give a "
            "PipelineModule to deepspeed.initialize, and call engine.train_batch(); for the Trainer, divide the model "
            'by "tensor_parallel" or ZeRO stage 3',
            "Trainer(model=...)",
        )


def _match(wrapped: Callable[..., Any], config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ``train_batch_size`` that counts the processes that read different samples matches."""
    names = ("ds_key_long", "hf_val", "hf_key", "must_match")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given["ds_key_long"] == "train_batch_size":
        asked, shared = config.get_value("train_batch_size"), config.get_value("sequence_parallel_size", 1)
        shared *= config.get_value("tensor_parallel.autotp_size") or 1
        from ds_hf.deepspeed_api.initialize import is_rehearsed

        if isinstance(asked, int) and (asked * shared == given["hf_val"] or is_rehearsed()):
            return None
        config.ds_hf_total_is_open = asked == "auto" or getattr(config, "ds_hf_total_is_open", False)
    return wrapped(*args, **kwargs)


def _finalize(wrapped: Callable[..., Any], config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes that are "auto", see ``fill_sizes``. Below stage 3 transformers leaves two of them to accelerate, which
    looks at the top of the configuration only."""
    own = getattr(args[1] if len(args) > 1 else kwargs["model"], "config", None)
    fill_sizes(config, own, ("", "text_config") if config.is_zero3() else ("",))
    found = wrapped(*args, **kwargs)
    given = dict(zip(("args", "model"), args, strict=False)) | kwargs
    if config.is_zero3() and type(given["args"]).__module__.startswith("trl."):
        _undo_trl(config, given["args"], given["model"])
    return found


def _undo_trl(config: Any, arguments: Any, model: Any) -> None:
    """Checkpointing that does not go through autograd twice, and adapters in fp32 where no master copies are fp32: TRL
    changes both for PEFT at DeepSpeed's stage 3 (its issue 6089; DeepSpeed's 8072 and 8130)."""
    if not hasattr(model, "peft_config") or (config.config.get("ds_hf") or {}).get("trl_workarounds"):
        return
    done = []
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        options = getattr(arguments, name, None)
        if isinstance(options, dict) and options.get("use_reentrant"):
            options["use_reentrant"] = False  # where the Trainer reads them later
    for module in model.modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if isinstance(function, partial) and function.keywords.get("use_reentrant"):
            options = {**function.keywords, "use_reentrant": False}
            module._gradient_checkpointing_func = partial(function.func, *function.args, **options)
            done = ["checkpointing is not reentrant"]
    if not any(config.is_true(f"{name}.enabled") for name in ("bf16", "fp16", "amp")):
        narrow = [p for n, p in model.named_parameters() if "lora_" in n and p.requires_grad and p.dtype.itemsize == 2]
        for param in narrow:
            if param.numel():  # not where a process holds a part
                param.data = param.data.float()
        done += ["adapters are fp32"] if narrow else []
    if done:
        log_once(
            f"{' and '.join(done)}: TRL had changed that for DeepSpeed's stage 3, which is not needed here "
            '("ds_hf": {"trl_workarounds": true} leaves it)'
        )


def _given(trainer: Any) -> tuple[Any, Any]:
    """``optimizers=`` of the Trainer; what it holds in their place after a first ``train()`` are wrappers."""
    if trainer.optimizer is None:  # none given, or model_init made a new model
        return None, None
    if GIVEN not in trainer.__dict__:
        trainer.__dict__[GIVEN] = (
            (trainer.optimizer, trainer.lr_scheduler) if not _is_wrapper(trainer) else (None, None)
        )
    found: tuple[Any, Any] = trainer.__dict__[GIVEN]
    return found


def _is_wrapper(trainer: Any) -> bool:
    from accelerate.optimizer import AcceleratedOptimizer

    return isinstance(trainer.optimizer, AcceleratedOptimizer)


def _init_inference(init: Callable[[], Any], hf_config: Any) -> Any:
    if "optimizer" in hf_config.config:
        hf_config.__dict__[SECTION] = hf_config.config["optimizer"]
    hf_config.is_zero3 = lambda: True  # what transformers asks before it refuses
    try:
        return init()
    finally:
        del hf_config.is_zero3
