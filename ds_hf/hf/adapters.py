"""PEFT makes adapters around weights that ``from_pretrained`` has sharded at ZeRO stage 3.

LoRA's own initialisations gather what they read; other methods (DeLoRA's norms, OSF's and FRoD's decompositions, shapes
in LoHa) read weights that are not here. So these open themselves while adapters are put in. And PEFT would write parts
of adapters of layers that processes divide.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_hf.engine.zero.access import safe_get_full_grad
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.building import opening
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.replicas import expert_processes
from ds_hf.errors import DsHfError
from ds_hf.hf.autoload import wrap
from ds_hf.hf.loss import with_values

__all__ = ["wrap_adalora", "wrap_corda", "wrap_eva", "wrap_loading", "wrap_tokens", "wrap_tuners"]


def wrap_tuners(module: ModuleType) -> None:
    """Hook of ``peft.tuners.tuners_utils``."""
    wrap(module, "BaseTuner.__init__", _with_whole_weights)  # some look at all weights before they put adapters in
    wrap(module, "BaseTuner.inject_adapter", _into_whole_layers)


def wrap_loading(module: ModuleType) -> None:
    """Hook of ``peft.utils.save_and_load``: of an adapter from a file, ``modules_to_save`` are copies in shards."""
    wrap(module, "set_peft_model_state_dict", _into_whole_adapters)
    wrap(module, "get_peft_model_state_dict", _whole_alone)


def wrap_adalora(module: ModuleType) -> None:
    """Hook of ``peft.tuners.adalora.model``."""
    wrap(module, "AdaLoraModel.update_and_allocate", _allocating)


def wrap_tokens(module: ModuleType) -> None:
    """Hook of ``peft.tuners.trainable_tokens.layer``."""
    wrap(module, "TrainableTokensLayer._collect_token_weights", _rows)


def wrap_eva(module: ModuleType) -> None:
    """Hook of ``peft.tuners.lora.eva``: runs the model on samples before it has an engine, as CorDA does."""
    wrap(module, "get_eva_state_dict", _with_whole_weights)


def wrap_corda(module: ModuleType) -> None:
    """Hook of ``peft.tuners.lora.corda``."""
    wrap(module, "preprocess_corda", _with_whole_weights)


def _with_whole_weights(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model = args[0] if args else kwargs["model"]
    with opening(list(model.parameters())):
        return wrapped(*args, **kwargs)


def _into_whole_layers(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An adapter that comes when processes divide a layer would be as large as the whole layer, or as the part."""
    found = _with_whole_weights(wrapped, _, args, kwargs)
    given = dict(zip(("model", "adapter_name"), args, strict=False)) | kwargs
    for name, module in given["model"].named_modules():
        if not any(map(_is_divided, getattr(module, "base_layer", nn.Module()).parameters())):
            continue
        mine = [param for key, param in module.named_parameters() if given["adapter_name"] in key.split(".")]
        if mine and not any(map(_is_divided, mine)):
            raise DsHfError(
                f"the adapter {given['adapter_name']!r} came to {name}, which processes divide since initialize(): "
                "call add_adapter() or load_adapter() before initialize()"
            )
    return found


def _into_whole_adapters(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a file, whose weights are whole."""
    given = dict(zip(("model", "peft_model_state_dict", "adapter_name"), args, strict=False)) | kwargs
    adapter = given.get("adapter_name", "default")
    for name, param in given["model"].named_parameters():
        if _is_divided(param) and adapter in name.split("."):
            raise DsHfError(
                f"processes divide {name} since initialize(), and whole weights do not fit: load the adapter "
                f"{adapter!r} before initialize(), or resume from a checkpoint of the engine"
            )
    return _with_whole_weights(wrapped, _, args, kwargs)


def _is_divided(param: nn.Parameter) -> bool:
    return is_cut(param) or expert_processes(param) > 1


def _whole_alone(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An adapter of a layer that processes divide would be written in parts. What others than the first get is not
    looked at: whole weights are given to that one alone."""
    found = wrapped(*args, **kwargs)
    given = dict(zip(("model", "state_dict", "adapter_name"), args, strict=False)) | kwargs
    if given.get("state_dict") is not None or (dist.is_initialized() and dist.get_rank()):
        return found
    added = re.compile(rf"\.modules_to_save(?=\.)|\.{re.escape(given.get('adapter_name', 'default'))}(?=\.|$)")
    for name, param in given["model"].named_parameters():
        if _is_divided(param) and added.sub("", name) in found:
            raise DsHfError(
                f"PEFT would write the part of {name} that this process has, as if it were the whole: call "
                "engine._consolidated_16bit_state_dict() on all processes, or accelerator.get_state_dict(engine), and "
                "give what the first gets as state_dict= of save_pretrained or get_peft_model_state_dict"
            )
    return found


def _allocating(wrapped: Callable[..., Any], adapted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trained = [param for param in adapted.parameters() if param.requires_grad and home_of(param) is not None]
    if not trained:
        return wrapped(*args, **kwargs)
    layers = importlib.import_module("peft.tuners.adalora.layer")  # asks safe_get_full_grad if there is a configuration
    try:  # what is written by the first process reaches masters, too
        with with_values(layers, deepspeed_config=dict), GatheredParameters(trained, modifier_rank=0):
            return wrapped(*args, **kwargs)
    except TypeError as error:
        if any(safe_get_full_grad(param) is not None for param in trained):
            raise
        raise DsHfError(
            "update_and_allocate() of AdaLoRA reads gradients, and there are none: call it after engine.backward(loss) "
            "and before engine.step(). The Trainer and accelerate's backward() make the step themselves: leave the "
            "call out there, so that all adapters keep init_r, or train in a loop with ds_hf.initialize()"
        ) from error


def _rows(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PEFT's own sends rank 0's, between CUDA devices alone; here the embedding opens itself, on every rank."""
    weight, rows = args[:2]
    with opening([weight]):
        return weight[rows].clone()
