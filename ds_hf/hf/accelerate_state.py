"""Hooks on accelerate: the backend of a machine without an accelerator, what a DeepSpeed config may be, and checkpoints
that are written in the background.

accelerate asks for a backend only where it finds a device it knows. On a CPU machine it finds none, lets DeepSpeed make
the process group all the same, and then believes on every rank that it is alone: no data are divided. Naming gloo
there is all that it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import wrapt

from ds_hf.hf.source import plain_config

__all__ = ["has_accelerator", "wrap_accelerator", "wrap_config", "wrap_state"]


def wrap_state(module: ModuleType) -> None:
    """Hook of ``accelerate.state``."""
    no_device = module.DistributedType.NO

    def prepare_backend(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        backend, kind = wrapped(*args, **kwargs)
        if backend is None and kind == no_device and _deepspeed_processes() and not has_accelerator():
            return "gloo", kind
        return backend, kind

    wrapt.wrap_function_wrapper(module, "PartialState._prepare_backend", prepare_backend)


def wrap_config(module: ModuleType) -> None:
    """Hook of ``accelerate.utils.deepspeed``: presets, comments and checking wherever a config is taken."""

    def read_first(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return wrapped(plain_config(args[0]), *args[1:], **kwargs)
        return wrapped(**{**kwargs, "config_file_or_dict": plain_config(kwargs["config_file_or_dict"])})

    wrapt.wrap_function_wrapper(module, "HfDeepSpeedConfig.__init__", read_first)


def wrap_accelerator(module: ModuleType) -> None:
    """Hook of ``accelerate.accelerator``: what is being written in the background is on disk before ``save_state()``
    removes older checkpoints (``total_limit``), and when ``end_training()`` returns."""

    def written(end: str) -> Callable[..., Any]:
        def wait_first(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
            for model in accelerator._models:
                writer = getattr(model, "checkpoint_writer", None)
                if writer is not None:
                    getattr(writer, end)()
            return wrapped(*args, **kwargs)

        return wait_first

    wrapt.wrap_function_wrapper(module, "Accelerator.save_state", written("wait"))
    wrapt.wrap_function_wrapper(module, "Accelerator.end_training", written("close"))  # some call it on rank 0 alone


def has_accelerator() -> bool:
    """Whether torch finds any accelerator in this process (CUDA, XPU, NPU, MPS, ...)."""
    return bool(torch.accelerator.is_available())


def _deepspeed_processes() -> bool:
    """A launcher started this process, and DeepSpeed is asked for."""
    launched = int(os.environ.get("LOCAL_RANK") or -1) != -1
    return launched and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
