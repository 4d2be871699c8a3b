"""What processes that train one model are compared by."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hf
from ds_hf.engine.parallel.likeness import describe_model, describe_users_modules
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


def test_an_engine_inside_a_model_is_of_its_process() -> None:
    """Its dictionaries have ids of objects as keys, which differ on each process."""
    engine = ds_hf.initialize(model=nn.Linear(2, 2), config=base_config(0))[0]
    student = nn.Sequential(nn.Linear(2, 2))
    student.teacher = engine
    student.levels = 3
    assert describe_users_modules(nn.ModuleList([student])) == {}
    assert not any("param_names" in key for key in describe_model(student))
    engine.destroy()
