"""Students of fewer layers, which begin as some of a teacher's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_hf.compression.schedule import read_section
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError, Fault

__all__ = ["student_initialization"]

_BASE = "/compression_training/layer_reduction"


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> None:
    """Copy what ``compression_training.layer_reduction`` names from the teacher to the student (DeepSpeed's name).

    Layer i of the student, below ``module_name_prefix``, begins as layer ``teacher_layer[i]``; the modules of
    ``other_module_name`` as the teacher's of these names. Values of sharded parameters (``zero.Init``) are gathered for
    it, one module at a time. Collective there.

    Raises:
        ConfigError: a name is in one of the two models alone, the numbers of layers are others, or parameters have
            other names or shapes: the teacher is of another family.
    """
    section = read_section(deepspeed_config).layer_reduction
    prefix = section.module_name_prefix
    if prefix is None or not section.teacher_layer:
        fix = 'add "module_name_prefix" and "teacher_layer"'
        raise ConfigError([Fault(_BASE, "which layers the student begins as is not said", fix)], "compression_training")
    students, teachers = _children(student_model, prefix, "student"), _children(teacher_model, prefix, "teacher")
    wanted = len(section.teacher_layer)
    if students != wanted:
        message = f"the student has {students} layers below {prefix}, and teacher_layer names {wanted}"
        raise ConfigError(
            [Fault(f"{_BASE}/teacher_layer", message, f"make the student with {wanted} layers, or name {students}")],
            "compression_training",
        )
    if max(section.teacher_layer) >= teachers:
        message = f"the teacher has {teachers} layers below {prefix}, counted from 0"
        fix = f"leave {max(section.teacher_layer)} out"
        raise ConfigError([Fault(f"{_BASE}/teacher_layer", message, fix)], "compression_training")
    pairs = [(f"{prefix}.{index}", f"{prefix}.{layer}") for index, layer in enumerate(section.teacher_layer)]
    pairs += [(name, name) for name in section.other_module_name]
    both = [
        (to, _module(student_model, to, "student"), _module(teacher_model, source, "teacher")) for to, source in pairs
    ]
    for name, student, teacher in both:
        _check_alike(name, student, teacher)
    for _, student, teacher in both:
        _copy(student, teacher)


def _module(model: nn.Module, name: str, which: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        near = ", ".join(child for child, _ in model.named_children())
        key = "module_name_prefix" if name[-1:].isdigit() else "other_module_name"
        message = f"the {which} ({type(model).__name__}) has no module {name}; it begins with {near}"
        fix = "give names of modules that both models have: the teacher has to be of the student's family"
        raise ConfigError([Fault(f"{_BASE}/{key}", message, fix)], "compression_training") from None


def _children(model: nn.Module, prefix: str, which: str) -> int:
    return sum(1 for name, _ in _module(model, prefix, which).named_children() if name.isdigit())


def _check_alike(name: str, student: nn.Module, teacher: nn.Module) -> None:
    ours = {key: tuple(logical_shape(param)) for key, param in student.named_parameters()}
    theirs = {key: tuple(logical_shape(param)) for key, param in teacher.named_parameters()}
    if ours == theirs:
        return
    other = next(key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key))
    message = f"{name}.{other} is {ours.get(other, 'not there')} in the student and {theirs.get(other, 'not there')} in"
    fix = "take a teacher of the student's family and width: layers are left out, and not made smaller"
    raise ConfigError([Fault(_BASE, f"{message} the teacher", fix)], "compression_training")


@torch.no_grad()
def _copy(student: nn.Module, teacher: nn.Module) -> None:
    with (
        GatheredParameters(list(teacher.parameters())),
        GatheredParameters(list(student.parameters()), modifier_rank=0),
    ):
        for to, source in zip(student.parameters(), teacher.parameters(), strict=True):
            to.data.copy_(source.data)
        for ours, theirs in zip(student.buffers(), teacher.buffers(), strict=False):
            if ours.shape == theirs.shape:
                ours.copy_(theirs)
