"""The longest text of a model with a table of positions, against the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from ds_hf.engine.modules.positions import positions_of

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99,
        "max_position_embeddings": 40, "pad_token_id": 1}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 99,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40,
        "pad_token_id": 1}  # fmt: skip
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
       "vocab_size": 99, "max_position_embeddings": 40, "pad_token_id": 1}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99, "n_positions": 40}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
          "image_size": 16, "patch_size": 8}  # fmt: skip
LLAMA = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99,
         "max_position_embeddings": 40}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "positions"),
    [
        ("bert", BERT, 40),
        ("roberta", BERT, 38),  # counts from behind the row of padding
        ("yoso", BERT, 40),  # two rows more than positions
        ("bart", BART, 40),
        ("opt", OPT, 40),  # an offset of two
        ("gpt2", GPT2, 40),
    ],
)
def test_the_longest_that_works(kind: str, sizes: dict[str, Any], positions: int) -> None:
    model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    assert positions_of(model) == positions
    with torch.no_grad():
        model(input_ids=torch.full((1, positions), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, positions + 1), 7))


def test_positions_that_are_computed_end_nowhere() -> None:
    model = AutoModel.from_config(AutoConfig.for_model("llama", **LLAMA)).eval()
    assert positions_of(model) is None
    with torch.no_grad():
        model(input_ids=torch.full((1, 64), 7))


def test_patches_of_an_image_are_no_text() -> None:
    config = AutoConfig.for_model("llava", text_config={"model_type": "llama", **LLAMA},
                                  vision_config={"model_type": "clip_vision_model", **VISION})  # fmt: skip
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert any("position_embedding" in name for name, _ in model.named_modules())
    assert positions_of(model) is None
