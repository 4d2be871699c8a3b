"""``init_compression``, and what ``initialize`` does with a file that has ``compression_training``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ds_hf.compression.compressed import Compressed
from ds_hf.compression.schedule import CompressionSchedule, keep, read_section, schedule_of
from ds_hf.compression.scopes import Group, find_groups, prepare_layers
from ds_hf.compression.shrinking import shrinking_faults, tied_faults
from ds_hf.compression.students import student_initialization
from ds_hf.config.types import Config
from ds_hf.config.types.compression import CompressionTrainingSection
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["init_compression", "prepare_model"]

_BASE = "/compression_training"
_SOURCE = "compression_training"
_WEIGHING = {"DoRA": "lora_magnitude_vector", "HiRA": "hira_A"}  # what a layer of PEFT's has then


def init_compression(model: nn.Module, deepspeed_config: Any, teacher_model: Any = None, mpu: Any = None) -> nn.Module:
    """Prepare ``model`` for compression during training (DeepSpeed's name), before ``initialize``.

    Layers that the file means get classes that compress; they stay the same objects, with their parameters. Parameters
    may be sharded already (``zero.Init``, ``from_pretrained`` at stage 3).

    Args:
        model: changed in place.
        deepspeed_config: path, dict or JSON text with ``compression_training``, or that section.
        teacher_model: what ``layer_reduction`` copies layers from.
        mpu: must be ``None``: layers that processes divide are not compressed.

    Returns:
        ``model``.

    Raises:
        ConfigError: what the file says does not fit the model; all of it at once.
    """
    if mpu is not None:
        raise ConfigError("init_compression(mpu=...): layers that processes divide are not compressed; leave mpu out")
    section = read_section(deepspeed_config)
    if schedule_of(model) is not None:
        raise ConfigError("this model was given to init_compression() before; redundancy_clean() ends that")
    if section.layer_reduction.enabled:
        if teacher_model is None:
            fix = "call init_compression(model, config, teacher_model=...) before initialize()"
            raise ConfigError([Fault(f"{_BASE}/layer_reduction", "it needs the teacher", fix)], _SOURCE)
        student_initialization(model, teacher_model, section)
    _prepare(model, section)
    return model


def _prepare(model: nn.Module, section: CompressionTrainingSection) -> CompressionSchedule:
    groups = find_groups(model, section)
    named = dict(model.named_modules())
    faults = [*shrinking_faults(named, groups), *tied_faults(model, groups), *_weighed_faults(named, groups)]
    if faults:
        raise ConfigError(faults, _SOURCE)
    prepare_layers(model, groups)
    schedule = CompressionSchedule(model, section, groups)
    keep(model, schedule)
    _tell_adapters(model, groups)
    if section.head_pruning.shared_parameters.enabled:
        _tell_heads(model, [group for group in groups if group.method == "head_pruning" and group.related])
    return schedule


def _weighed_faults(named: Mapping[str, nn.Module], groups: list[Group]) -> Iterator[Fault]:
    """Adapters that compute with their layer's weight besides calling it: with the weight as the optimizer has it, and
    at the end with the compressed one, which is another model than the trained one."""
    for group in groups:
        for name in group.layers if group.method != "activation_quantization" else ():
            layer, _, last = name.rpartition(".")
            kinds = [kind for kind, part in _WEIGHING.items() if getattr(named[layer], part, None)]
            if last == "base_layer" and kinds:
                message = f"{kinds[0]} of {layer} computes with the weight as it is before it is compressed"
                fix = "use LoRA (use_dora=False), or leave the layer out of the group"
                yield Fault(group.pointer, message, fix)


def _tell_adapters(model: nn.Module, groups: list[Group]) -> None:
    """Before training, whose adapters are of no use over weights that were not compressed."""
    if hasattr(model, "peft_config") and any(group.method != "activation_quantization" for group in groups):
        warn_once(
            "compression_training changes weights under adapters, and save_pretrained() writes the adapters alone, "
            "which learn beside the compressed weights: after redundancy_clean() write all of it, as "
            "model.merge_and_unload().save_pretrained(folder) does"
        )


def _tell_heads(model: nn.Module, groups: list[Group]) -> None:
    """Before training, where its end cannot be loaded by plain transformers."""
    config = getattr(model, "config", None)
    if groups and hasattr(config, "num_attention_heads") and not hasattr(config, "head_dim"):
        warn_once(
            f"head_pruning: heads of {type(model).__name__} have hidden_size / num_attention_heads values, "
            "so its configuration cannot say that there are fewer. What redundancy_clean() gives computes, and "
            "from_pretrained() does not load it; without related_modules the heads become zeros, and it does"
        )


def prepare_model(
    settings: Config, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> Iterable[Any] | None:
    """Before an engine is built: a model that ``init_compression`` was not given is prepared here.

    Scores that pruning learns are put among the parameters that were given: to the first group without weight decay,
    or else the first. Schedules of learning rates that were made for them go on.

    Returns:
        The parameters to train.

    Raises:
        ConfigError: the file does not fit the model, or says something else than ``init_compression`` was told.
    """
    section, schedule = settings.compression_training, schedule_of(model)
    if schedule is not None and section.acts and schedule.section != section:
        message = "init_compression() was given another section than this file has"
        raise ConfigError([Fault(_BASE, message, "give both the same file")], settings.source)
    if schedule is None and not section.acts:
        return model_parameters
    _refuse_division(settings, model)
    if schedule is not None:
        return model_parameters
    if section.layer_reduction.enabled:
        message = "layers of a teacher are to be copied, and initialize() has no teacher"
        fix = "call init_compression(model, config, teacher_model=...) before initialize()"
        raise ConfigError([Fault(f"{_BASE}/layer_reduction", message, fix)], settings.source)
    _prepare(model, section)
    if section.trains_scores:
        return _add_scores(model, optimizer, model_parameters)
    return model_parameters


def _refuse_division(settings: Config, model: nn.Module) -> None:
    mesh = settings.mesh
    what = (
        "stages of a pipeline have parts of the model's names"
        if isinstance(model, StageModule) or (mesh is not None and mesh.pipe > 1)
        else "layers are divided among processes, and masks and scales are of whole weights"
        if mesh is not None and mesh.tensor > 1
        else "experts are divided among processes"
        if mesh is not None and mesh.expert > 1
        else None
    )
    if what is not None:
        fix = "train with ZeRO's stages 0 to 3 alone, or remove the block"
        raise ConfigError([Fault(_BASE, what, fix)], settings.source)


def _add_scores(model: nn.Module, optimizer: Any, given: Iterable[Any] | None) -> Iterable[Any] | None:
    scores = [
        param
        for module in model.modules()
        if isinstance(module, Compressed)
        for name, param in module.named_parameters(recurse=False)
        if name.endswith("_mask_scores")
    ]
    if isinstance(optimizer, Optimizer):
        _put(optimizer.param_groups, scores)
    if given is None:
        return None
    listed = list(given)
    if listed and isinstance(listed[0], dict):
        _put(listed, scores)
        return listed
    known = {id(each[1] if isinstance(each, tuple) else each) for each in listed}
    named = bool(listed) and isinstance(listed[0], tuple)
    new = [score for score in scores if id(score) not in known]
    return [*listed, *((f"scores.{index}", score) if named else score for index, score in enumerate(new))]


def _put(groups: list[dict[str, Any]], scores: list[nn.Parameter]) -> None:
    known = {id(param) for group in groups for param in group["params"]}
    target = next((group for group in groups if group.get("weight_decay") == 0), groups[0])
    target["params"] = [*target["params"], *(score for score in scores if id(score) not in known)]


def __getattr__(name: str) -> Any:
    """What ``deepspeed.compression.compress`` has besides, for ``import ds_hf as deepspeed``."""
    from ds_hf.stand_in import name_of_deepspeed

    return name_of_deepspeed(__name__, name)
