"""Where ``init_inference`` reads weights from: folders, lists of files, checkpoints; and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_hf
from ds_hf.errors import CheckpointError
from tests.helpers.generating import GREEDY, left_padded, small_model


def empty(name: str = "llama") -> Any:
    with torch.device("meta"):
        return small_model(name)


def tokens(model: Any) -> list[Any]:
    found: list[Any] = model.generate(**left_padded(), **GREEDY).tolist()
    return found


def test_deepspeeds_list_of_files(tmp_path: Path) -> None:
    model = small_model("llama")
    state = model.state_dict()
    names = list(state)
    torch.save({name: state[name] for name in names[:9]}, tmp_path / "one.bin")
    torch.save({"module": {name: state[name] for name in names[9:]}}, tmp_path / "two.pt")
    listed = {"type": "ds_model", "checkpoints": ["one.bin", "two.pt"], "version": 1.0}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    for checkpoint, base in ((str(tmp_path / "list.json"), ""), (listed, str(tmp_path))):
        engine = ds_hf.init_inference(empty(), dtype="fp32", checkpoint=checkpoint, base_dir=base)
        assert tokens(engine) == tokens(model)


def test_a_checkpoint_of_training(tmp_path: Path) -> None:
    """Its masters, in the dtype that is asked for."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = small_model("gpt2")
    trained, *_ = ds_hf.initialize(model=small_model("gpt2"), config=settings)
    trained.save_checkpoint(tmp_path, "one")
    trained.destroy()
    engine = ds_hf.init_inference(empty("gpt2"), dtype="fp32", checkpoint=str(tmp_path))
    assert engine.module.lm_head.weight is engine.module.transformer.wte.weight
    assert tokens(engine) == tokens(model)


def test_a_model_with_values_takes_those_of_the_folder(tmp_path: Path) -> None:
    model = small_model("llama", seed=1)
    model.model.save_pretrained(tmp_path)  # the base alone: without the head, and without its prefix
    other = small_model("llama")
    engine = ds_hf.init_inference(other, dtype="fp32", checkpoint=str(tmp_path))
    assert torch.equal(engine.module.model.norm.weight, model.model.norm.weight)
    assert torch.equal(other.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    assert torch.equal(other.lm_head.weight, small_model("llama").lm_head.weight)
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight, and the model was made without values"):
        ds_hf.init_inference(empty(), dtype="fp32", checkpoint=str(tmp_path))


def test_what_does_not_fit(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    wide = empty()
    wide.lm_head = torch.nn.Linear(64, 130, bias=False, device="meta")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is \[128, 64\] in the checkpoint.*\[130, 64\]"):
        ds_hf.init_inference(wide, dtype="fp32", checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match="none of the model's weights"):
        ds_hf.init_inference(torch.nn.Linear(2, 2), dtype="fp32", checkpoint=str(tmp_path))
    for content, text in (
        ({"checkpoints": ["gone.bin"]}, "gone.bin is missing"),
        ({"checkpoints": []}, "names no files"),
        ({"checkpoints": {"tp": ["a"], "non_tp": ["b"]}}, "give the whole weights"),
    ):
        with pytest.raises(CheckpointError, match=text):
            ds_hf.init_inference(empty(), dtype="fp32", checkpoint=content, base_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match="does not exist"):
        ds_hf.init_inference(empty(), dtype="fp32", checkpoint="/nowhere")
