"""What is said on a model of how its layers are cut, against the cuts, as the reader of such checkpoints takes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info

from ds_hf.checkpoint.deepspeed.slices import SliceRules
from ds_hf.config import load_config
from ds_hf.engine.parallel.tensor.divide import divide_without_values
from ds_hf.engine.zero.cut import cut_of
from tests.helpers.tensor import build, tensor_section


def cut(kind: str) -> Any:
    """A model on the meta device, as the first of two processes has it."""
    with torch.device("meta"):
        model = copy.deepcopy(build(kind)).to("meta")
    file = {"train_batch_size": 1, "tensor_parallel": tensor_section(kind, 2)}
    divide_without_values(model, 2, load_config(file, check_batch=False).tensor_parallel)
    return model


@pytest.mark.parametrize("kind", ["llama", "fused"])
def test_slices_join_as_they_were_cut(kind: str, tmp_path: Path) -> None:
    model = cut(kind)
    info = collect_autotp_universal_checkpoint_info(model)
    rules, seen = SliceRules(info, tmp_path, 2), 0
    for name, param in model.named_parameters():
        found, known = rules.place(name, [tuple(param.shape)] * 2), cut_of(param)
        if known is None:
            assert tuple(found.shape) == tuple(param.shape), name
            continue
        seen += 1
        assert tuple(found.shape) == tuple(known.whole), name
        assert (found.cuts[0].dim, tuple(found.cuts[0].ranges)) == (known.dim, known.ranges), name
    assert seen > 6
    assert not rules.unused()


def test_names() -> None:
    model = cut("llama")
    info = collect_autotp_universal_checkpoint_info(model)
    assert UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info"
    assert info["universal_checkpoint_version"] == 0.4
    assert r"^model\.norm\.weight$" in info["tp_replicated_parameter_patterns"]
    assert r"^model\.layers\.0\.mlp\.down_proj\.weight$" in info["parameter_with_row_parallelism_patterns"]
    embedding = [r"^model\.embed_tokens\.weight$"] if cut_of(model.model.embed_tokens.weight) else []  # since 5.20
    assert info["vocabulary_parameter_patterns"] == [r"^lm_head\.weight$", *embedding]
    assert info["original_vocab_size"] == 64
