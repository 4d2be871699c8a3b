"""Hook on ``TrainingArguments``: ``--deepspeed`` is checked before anything else happens, and works without a GPU.

Order inside ``__post_init__``: read and check the configuration, compare it with the arguments, settle the flags that
would switch DeepSpeed off on a CPU machine; then transformers' own code runs with the checked dict. The attribute
``deepspeed`` ends up as the user gave it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ds_hf.config import Config
from ds_hf.config.triple import WorldSize
from ds_hf.errors import ConfigError, Fault
from ds_hf.hf import auto
from ds_hf.hf.accelerate_state import has_accelerator, learn_of_launcher
from ds_hf.hf.autoload import wrap
from ds_hf.hf.mismatch import find_mismatches
from ds_hf.hf.optimizers import find_unfit_optimizers
from ds_hf.hf.source import AUTO, checked_config, plain_config
from ds_hf.log import log_once, logger, warn_once
from ds_hf.measure.saving import being_measured

__all__ = ["wrap_training_args"]

CPU_FLAG = "ACCELERATE_USE_CPU"


def wrap_training_args(module: ModuleType) -> None:
    """Hook of ``transformers.training_args``."""
    wrap(module, "TrainingArguments.__post_init__", _check_first)
    wrap(module, "TrainingArguments._validate_args", _allow_bf16_on_cpu)


def _check_first(wrapped: Callable[..., None], arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _wants_deepspeed(arguments):
        return wrapped(*args, **kwargs)
    learn_of_launcher()
    if being_measured():  # neither logs nor a repository of a training that does not happen
        arguments.report_to, arguments.push_to_hub = "none", False
    given = arguments.deepspeed
    if not given:  # accelerate launch named the configuration: its plugin reads it
        _refuse(find_unfit_optimizers(None, arguments), "the training arguments")
        if file := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            _take_elastic_batch(checked_config(file, None if WorldSize.launched() else 1), arguments)
        _settle_cpu(arguments)
        return wrapped(*args, **kwargs)
    alone = None if WorldSize.launched() else 1
    config = checked_config(given, alone)
    _take_elastic_batch(config, arguments)
    _refuse(find_unfit_optimizers(config, arguments), f"{config.source} and the training arguments")
    faults = find_mismatches(config, arguments)
    if faults:
        error = ConfigError(faults, f"{config.source} and the training arguments")
        if not isinstance(given, Mapping):
            raise error
        # A program made it, and may change it, or the arguments: transformers compares them when training starts.
        logger.warning("%s\nTraining will refuse to start.", error)
    _settle_cpu(arguments)
    _share_sequences(config, arguments)
    with _replaced(arguments, plain_config(given, alone)):
        wrapped(*args, **kwargs)
    if arguments.n_gpu > 1:
        # A plain `python train.py` on a machine with several GPUs: an engine drives one device, and there is no
        # DataParallel around it that would divide a batch of n_gpu times the size.
        arguments._n_gpu = 1
    if given == AUTO:
        auto.choose_at_parse_time(arguments)
    return None


def _take_elastic_batch(config: Config, arguments: Any) -> None:
    """What elasticity chose for this number of processes becomes what the Trainer loads and accumulates."""
    if not config.elasticity.enabled:
        return
    if arguments.auto_find_batch_size:
        message = "elasticity chooses the micro-batch, and auto_find_batch_size would try others"
        _refuse([Fault("/elasticity", message, "remove one of the two")], f"{config.source} and the training arguments")
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert micro is not None
    assert steps is not None
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = micro, steps
    log_once(
        f"elasticity: per_device_train_batch_size = {micro} and gradient_accumulation_steps = {steps} make "
        f"{config.train_batch_size} samples a step"
    )


def _share_sequences(config: Config, arguments: Any) -> None:
    """What the file says of shared sequences becomes what the Trainer asks: it divides batches and losses by it."""
    given = getattr(arguments, "parallelism_config", None) is not None
    given = given or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    if config.sequence_parallel_size > 1 and not given and hasattr(arguments, "parallelism_config"):
        from accelerate.utils import ParallelismConfig

        arguments.parallelism_config = ParallelismConfig(sp_size=config.sequence_parallel_size, sp_backend="deepspeed")


def _refuse(faults: Sequence[Fault], source: str) -> None:
    if faults:
        raise ConfigError(faults, source)


def _allow_bf16_on_cpu(
    wrapped: Callable[..., None], arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """transformers takes bf16 on a CPU only with ``use_cpu``, which would switch DeepSpeed off afterwards."""
    if not _wants_deepspeed(arguments) or has_accelerator():
        return wrapped(*args, **kwargs)
    use_cpu, arguments.use_cpu = arguments.use_cpu, True
    try:
        return wrapped(*args, **kwargs)
    finally:
        arguments.use_cpu = use_cpu


def _wants_deepspeed(arguments: Any) -> bool:
    return bool(arguments.deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _settle_cpu(arguments: Any) -> None:
    """``use_cpu`` makes accelerate forget DeepSpeed without a word: refuse it, or drop it where it changes nothing."""
    flagged = os.environ.get(CPU_FLAG, "false").lower() in ("1", "true", "yes", "on", "y", "t")
    if not arguments.use_cpu and not flagged:
        return
    name = "--use_cpu" if arguments.use_cpu else f"{CPU_FLAG}=true"
    if has_accelerator():
        fault = Fault(
            "",
            f"{name} makes accelerate switch DeepSpeed off, so --deepspeed would have no effect",
            f"to train on the CPU hide the devices (CUDA_VISIBLE_DEVICES=) and drop {name}",
        )
        raise ConfigError([fault], "the training arguments")
    warn_once(f"{name} is dropped: this machine has no accelerator anyway, and accelerate would switch DeepSpeed off")
    if arguments.use_cpu:
        arguments.use_cpu = False
        arguments.dataloader_pin_memory = False
    if flagged:
        os.environ[CPU_FLAG] = "false"


@contextmanager
def _replaced(arguments: Any, config: dict[str, Any]) -> Iterator[None]:
    """``arguments.deepspeed`` is ``config`` inside and what the user gave afterwards."""
    given, arguments.deepspeed = arguments.deepspeed, config
    try:
        yield
    finally:
        arguments.deepspeed = given
