"""``install()``: registers the hooks on transformers and accelerate, without importing either.

torch calls it at the end of ``import torch`` (entry point of the group ``torch.backends``); ``import deepspeed`` calls
it too, for environments where that autoloading is off. It costs a few dictionary entries, is idempotent, and never
raises: a hook that no longer fits its target only warns. When a real DeepSpeed is the one that imports find, the hooks
do nothing, and who imports it is told.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from ds_hf.engine.comm.failure_record import record_failures
from ds_hf.log import logger, warn_once
from ds_hf.stand_in import beside_real

__all__ = ["install", "serves_deepspeed", "unfit_hooks", "wrap"]

Hook = Callable[[ModuleType], None]

_unfit: dict[str, str] = {}  # targets of hooks that do not fit, and why
_absent: list[str] = []  # names that the hooks which run now did not find

# module of the client -> our module and function that wrap something in it
HOOKS = {
    "accelerate.state": ("ds_hf.hf.accelerate_state", "wrap_state"),
    "accelerate.accelerator": ("ds_hf.hf.accelerate_state", "wrap_accelerator"),
    "accelerate.commands.launch": ("ds_hf.hf.accelerate_state", "wrap_launch"),
    "accelerate.data_loader": ("ds_hf.hf.accelerate_state", "wrap_data_loader"),
    "accelerate.utils.dataclasses": ("ds_hf.hf.accelerate_state", "wrap_plugin"),
    "accelerate.utils.deepspeed": ("ds_hf.hf.accelerate_state", "wrap_config"),
    "peft.tuners.tuners_utils": ("ds_hf.hf.adapters", "wrap_tuners"),
    "peft.tuners.adalora.model": ("ds_hf.hf.adapters", "wrap_adalora"),
    "peft.tuners.trainable_tokens.layer": ("ds_hf.hf.adapters", "wrap_tokens"),
    "peft.tuners.lora.corda": ("ds_hf.hf.adapters", "wrap_corda"),
    "peft.tuners.lora.eva": ("ds_hf.hf.adapters", "wrap_eva"),
    "peft.utils.save_and_load": ("ds_hf.hf.adapters", "wrap_loading"),
    "trl.trainer.utils": ("ds_hf.hf.hashing", "wrap_hash"),
    "transformers.training_args": ("ds_hf.hf.training_args", "wrap_training_args"),
    "transformers.integrations.deepspeed": ("ds_hf.hf.integration", "wrap_integration"),
    "transformers.generation.utils": ("ds_hf.hf.generation", "wrap_generation"),
    "transformers.modeling_utils": ("ds_hf.hf.modeling", "wrap_modeling"),
    "transformers.trainer_utils": ("ds_hf.hf.trainer", "wrap_trainer_utils"),
    "transformers.trainer": ("ds_hf.hf.trainer", "wrap_trainer"),
    "transformers.trainer_jit_checkpoint": ("ds_hf.hf.signals", "wrap_jit_checkpoint"),
}


@functools.cache
def install() -> None:
    """Register all hooks; a second call does nothing."""
    try:
        record_failures()
        wrapt.register_post_import_hook(_tell, "deepspeed")
        for target, (module, function) in HOOKS.items():
            _register(target, _guarded(target, module, function))
    except Exception:
        logger.warning("ds_hf could not register its hooks; --deepspeed is not checked at parse time", exc_info=True)


def serves_deepspeed() -> bool:
    """Whether ``import deepspeed`` finds ds_hf's package and not a real DeepSpeed."""
    try:
        spec = find_spec("deepspeed")
    except ValueError:  # a module without a spec was put there
        return False
    ours = Path(__file__).resolve().parent.parent / "compat"
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().is_relative_to(ours)


def _tell(found: ModuleType) -> None:
    """Who imports a real DeepSpeed is told that it is not ds_hf: once, by rank 0, not by the processes it starts."""
    if multiprocessing.parent_process() is None and (told := beside_real()):
        warn_once(told)


def wrap(module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper`` around a function of ``module``. A release that renamed it loses this hook, and no other."""
    try:
        wrapt.wrap_function_wrapper(module, name, wrapper)
    except AttributeError:
        _absent.append(f"{module.__name__}.{name}")


def unfit_hooks() -> dict[str, str]:
    """Targets of hooks that do not fit what is installed, and why. Imports all of them."""
    for target in HOOKS:
        if find_spec(target.partition(".")[0]) is None:
            continue  # peft is not needed
        try:
            importlib.import_module(target)
        except Exception as error:
            _unfit.setdefault(target, _reason(error))
    return dict(_unfit)


def _guarded(target: str, module: str, function: str) -> Hook:
    def hook(found: ModuleType) -> None:
        before = len(_absent)  # not 0 inside another hook, which imported what this one is for
        try:
            if serves_deepspeed():
                getattr(importlib.import_module(module), function)(found)
                if len(_absent) > before:
                    raise AttributeError(f"there is no {', '.join(_absent[before:])}")
        except Exception as error:
            _unfit[target] = _reason(error)
            package = target.partition(".")[0]
            logger.warning(
                "ds_hf does not fit %s %s: %s has hooks that are off (%s); training with DeepSpeed may fail or be "
                "wrong. ds-hf doctor says which releases fit",
                package,
                _version(package),
                function,
                _unfit[target],
                exc_info=not isinstance(error, AttributeError),
            )
        finally:
            del _absent[before:]

    return hook


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _register(target: str, hook: Hook) -> None:
    module = sys.modules.get(target)
    spec = getattr(module, "__spec__", None)
    if module is not None and spec is not None and getattr(spec, "_initializing", False):
        # ``from transformers import TrainingArguments`` imports torch from *within* transformers.training_args: its
        # classes do not exist yet, and wrapt would call the hook at once.
        _when_initialized(module, spec, hook)
    else:
        wrapt.register_post_import_hook(hook, target)


def _when_initialized(module: ModuleType, spec: ModuleSpec, hook: Hook) -> None:
    """Call ``hook`` when the import that is under way ends: the import system then sets ``spec._initializing``."""
    plain: type[ModuleSpec] = type(spec)

    class WatchedSpec(plain):  # type: ignore[valid-type, misc]
        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__["_initializing"])

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                self.__class__ = plain  # type: ignore[assignment]
                hook(module)

    spec.__class__ = WatchedSpec
