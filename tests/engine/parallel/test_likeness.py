"""What processes that train one model are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hf
from ds_hf.engine.parallel.likeness import describe_listed, describe_model, describe_users_modules
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config


def tiny(**more: float) -> LlamaForCausalLM:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=1, **sizes, **more))


def test_a_model_that_one_process_has_saved_is_the_same(tmp_path: Path) -> None:
    before = describe_model(tiny())
    saved = tiny()
    saved.save_pretrained(tmp_path)
    assert describe_model(saved) == before
    assert describe_model(tiny(rms_norm_eps=1e-3)) != before
    assert describe_model(saved.to(torch.bfloat16)) != before


def test_tied_parameters_and_the_group_of_each_are_compared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = describe_model(model)
    model[1].weight = model[0].weight
    assert describe_model(model)["parameter 1.weight is tied to"] == "0.weight"
    assert "parameter 1.weight is tied to" not in before
    first, second = list(model[0].parameters()), [model[1].bias]
    swapped = torch.optim.SGD([{"params": second}, {"params": first}], lr=0.1)
    groups = {"group of 0.weight": "0", "group of 0.bias": "0", "group of 1.bias": "1"}
    groups["group of 1.weight"] = "0"
    assert describe_listed(model, None, [{"params": first}, {"params": second}]) == groups
    assert describe_listed(model, swapped, None) == {name: str(1 - int(number)) for name, number in groups.items()}
    named = describe_listed(model, None, list(model[0].named_parameters()))
    assert named == {name: "0" for name in groups if name != "group of 1.bias"}


def differently_listed() -> list[str]:
    faults = []
    for kind in ("tied", "fewer", "groups"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        given: dict[str, Any] = {"model_parameters": model.parameters()}
        if dist.get_rank() == 1 and kind == "tied":
            model[1].weight = model[0].weight
        if dist.get_rank() == 1 and kind == "fewer":
            given = {"model_parameters": model[0].parameters()}
        if kind == "groups":
            rates = (0.1, 0.2) if dist.get_rank() == 0 else (0.2, 0.1)
            parts = sorted(zip(rates, model, strict=True), key=lambda part: part[0])
            groups = [{"params": list(part.parameters()), "lr": rate} for rate, part in parts]
            given = {"optimizer": torch.optim.SGD(groups, lr=0.1)}
        with pytest.raises(ConfigError) as caught:
            ds_hf.initialize(model=model, config=base_config(1), **given)
        faults.append(str(caught.value))
    return faults


def test_processes_that_tie_or_list_parameters_differently_end_with_a_sentence() -> None:
    for tied, fewer, groups in run_distributed(differently_listed, 2, timeout=60):
        assert "parameter 1.weight is tied to is nothing on rank 0 and 0.weight on rank 1" in tied
        assert "group of 1.weight is 0 on rank 0 and nothing on rank 1" in fewer
        assert "group of 0.weight is 0 on rank 0 and 1 on rank 1" in groups


def test_an_engine_inside_a_model_is_of_its_process() -> None:
    """Its dictionaries have ids of objects as keys, which differ on each process."""
    engine = ds_hf.initialize(model=nn.Linear(2, 2), config=base_config(0))[0]
    student = nn.Sequential(nn.Linear(2, 2))
    student.teacher = engine
    student.levels = 3
    assert describe_users_modules(nn.ModuleList([student])) == {}
    assert not any("param_names" in key for key in describe_model(student))
    engine.destroy()
