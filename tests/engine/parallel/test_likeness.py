"""What processes that train one model are compared by."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hf.engine.parallel.likeness import describe_model


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
