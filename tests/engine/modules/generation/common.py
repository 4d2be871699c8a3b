"""A Llama of two blocks that draws nothing in forward unless it is asked to, and engines of it."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hf import Engine, initialize
from tests.helpers.parity import base_config, full_weights

VOCABULARY = 96
EOS = 5
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def llama(*, tied: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights on every rank."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.3,
    )
    return narrowed(LlamaForCausalLM(config), dtype)


def narrowed(model: Any, dtype: torch.dtype) -> Any:
    """With parameters of ``dtype``; buffers (of rotary embeddings) stay as they were made, as in an engine."""
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def engine_of(model: Any, stage: int, **more: Any) -> Engine:
    return initialize(model=model, config=base_config(stage, **{"optimizer": ADAMW, **more}))[0]


def tokens(seed: int, rows: int = 2, length: int = 7) -> Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(6, VOCABULARY, (rows, length), generator=generator)


def train(engine: Engine, seed: int, accumulation: int = 1) -> float:
    """One step; the loss of its last micro-batch."""
    last = 0.0
    for index in range(accumulation):
        ids = tokens(10 * seed + index)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        last = loss.item()
    return last


def plain_copy(engine: Engine, like: LlamaForCausalLM) -> Any:
    """A model without an engine that has the engine's weights now, in evaluation mode. Collective."""
    weights = full_weights(engine.module)
    missing = like.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    return like.eval()


def live_bytes() -> int:
    """Of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor) and found.device.type == "cpu" and type(found) in (Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
