"""Students begin as the layers of their teacher, also where parameters are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_hf.compression import init_compression, student_initialization
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.compression.common import config
from tests.helpers.distributed import run_distributed


class Stack(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, depth: int, width: int = 8, kind: Any = nn.Linear) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, width)
        self.layers = nn.ModuleList(kind(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16)


def normed(width: int, _: int) -> nn.Module:
    return nn.LayerNorm(width)


SECTION = {
    "layer_reduction": {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["emb"],
    }
}


def check(student: Any, teacher: Any, head: torch.Tensor) -> None:
    assert torch.equal(student.layers[0].weight, teacher.layers[1].weight)
    assert torch.equal(student.layers[1].bias, teacher.layers[3].bias)
    assert torch.equal(student.emb.weight, teacher.emb.weight)
    assert torch.equal(student.head.weight, head)


def test_layers_and_named_modules_are_the_teachers() -> None:
    student, teacher = Stack(2), Stack(4)
    head = student.head.weight.detach().clone()
    init_compression(student, config(SECTION), teacher_model=teacher)
    check(student, teacher, head)


def sharded() -> None:
    file = {**config(SECTION, 3)}
    with Init(config_dict_or_path=file):
        student, teacher = Stack(2), Stack(4)
    with GatheredParameters(student.parameters()):
        head = student.head.weight.detach().clone()
    student_initialization(student, teacher, file)
    with GatheredParameters(student.parameters()), GatheredParameters(teacher.parameters()):
        check(student, teacher, head)


def test_sharded_models_too() -> None:
    run_distributed(sharded, 2)


@pytest.mark.parametrize(
    ("student", "teacher", "change", "words"),
    [
        (Stack(3), Stack(4), {}, "student has 3 layers below layers, and teacher_layer names 2"),
        (Stack(2), Stack(3), {}, "teacher has 3 layers"),
        (Stack(2), Stack(4, width=12), {}, r"layers.0.weight is \(8, 8\) in the student and \(12, 12\)"),
        (Stack(2), Stack(4, kind=normed), {}, r"layers.0.weight is \(8, 8\) in the student and \(8,\) in"),
        (Stack(2), Stack(4), {"other_module_name": ["pooler"]}, "no module pooler; it begins with emb, layers, head"),
        (Stack(2), Stack(4), {"module_name_prefix": "encoder"}, "no module encoder"),
        (Stack(2), nn.Sequential(), {}, "teacher .Sequential. has no module layers"),
    ],
)
def test_a_teacher_of_another_family_is_refused(student: Any, teacher: Any, change: dict[str, Any], words: str) -> None:
    section = {"layer_reduction": {**SECTION["layer_reduction"], **change}}
    with pytest.raises(ConfigError, match=words) as caught:
        student_initialization(student, teacher, {"compression_training": section})
    assert caught.value.faults[0].fix
