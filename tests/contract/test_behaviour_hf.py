"""Tiny HuggingFace models of several families train as in plain torch, at every stage, also with checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, sgd, train_both

VOCAB, LENGTH = 31, 6
TOLERANCE = 2e-5
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip


def _built(config: Any, cls: Any) -> nn.Module:
    config.use_cache = False
    return cls._from_config(config, attn_implementation="eager")


def llama(tied: bool = False) -> nn.Module:
    return _built(transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied), transformers.LlamaForCausalLM)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return _built(config, transformers.GPT2LMHeadModel)


def t5() -> nn.Module:
    return _built(transformers.T5Config(**T5), transformers.T5ForConditionalGeneration)


def bart() -> nn.Module:
    config = transformers.BartConfig(vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=2, dropout=0.0,
                                     encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                                     decoder_ffn_dim=24, max_position_embeddings=32)  # fmt: skip
    return _built(config, transformers.BartForConditionalGeneration)


def bert() -> nn.Module:
    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return _built(config, transformers.BertForMaskedLM)


def albert() -> nn.Module:
    small = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    config = transformers.AlbertConfig(**{**small, "num_hidden_layers": 3}, embedding_size=8, hidden_dropout_prob=0.0,
                                       attention_probs_dropout_prob=0.0)  # fmt: skip
    return _built(config, transformers.AlbertForMaskedLM)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True)
    return _built(config, transformers.MixtralForCausalLM)


def frozen_llama() -> nn.Module:
    """Only the norms and the head train."""
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or "lm_head" in name)
    return model


def checkpointed(make: Callable[[], nn.Module], reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: Any = make()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads() if reentrant else None
        return model.train()  # type: ignore[no-any-return]

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama_tied": lambda: llama(tied=True),
    "llama_nonreentrant": checkpointed(llama, False),
    "llama_reentrant": checkpointed(llama, True),
    "llama_frozen": frozen_llama,
    "llama_frozen_nonreentrant": checkpointed(frozen_llama, False),
    "gpt2": gpt2,
    "t5": t5,
    "t5_nonreentrant": checkpointed(t5, False),
    "bart": bart,
    "bert": bert,
    "albert": albert,
    "mixtral": mixtral,
}


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def train_all(names: list[str]) -> dict[tuple[str, int], float]:
    shape = (2, 1, dist.get_world_size(), 2, LENGTH)
    data = torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(3))
    errors = {}
    for name in names:
        for stage in range(4):
            print("case", name, stage)
            torch.manual_seed(13)
            config = base_config(stage, optimizer=SGD, gradient_clipping=1.0)
            outcome = train_both(MODELS[name](), loss_of, data, config, reference_optimizer=sgd, same=name)
            errors[name, stage] = outcome.worst
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_families(world: int) -> None:
    for errors in run_distributed(train_all, world, list(MODELS), timeout=110):
        assert not {case: error for case, error in errors.items() if not error < TOLERANCE}
