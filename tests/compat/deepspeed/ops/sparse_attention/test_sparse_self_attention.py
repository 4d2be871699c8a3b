"""``deepspeed.ops.sparse_attention`` as scripts use it: modules, masks in their modes, BERT, padding."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
)
from deepspeed.runtime.config import get_sparse_attention
from torch import Tensor

from tests.engine.modules.sparse.reference import dense_attention, largest, of_tokens
from tests.helpers.distributed import run_distributed

TOKENS = 96


def attended(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 4, TOKENS, 16).to(dtype) for _ in range(3)]


def pattern() -> FixedSparsityConfig:
    return FixedSparsityConfig(num_heads=4, different_layout_per_head=True, num_different_global_patterns=4)


def test_a_corner_of_the_master_layout() -> None:
    module = SparseSelfAttention(pattern(), max_seq_length=256)
    assert module.master_layout.shape == (4, 16, 16)
    assert torch.equal(module.state_dict()["master_layout"], pattern().make_layout(256))
    assert torch.equal(module.get_layout(TOKENS), pattern().make_layout(256)[:, :6, :6])
    tensors = attended()
    allowed = of_tokens(module.get_layout(TOKENS), 16)
    assert largest(module(*tensors), dense_attention(*tensors, allowed)) <= 1e-6
    query, key, value = tensors
    assert torch.equal(module(query, key.transpose(2, 3), value), module(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("key_mode", "mode"), [("add", "mul"), ("mul", "add"), ("mul", "mul"), ("add", "add")])
def test_masks(key_mode: str, mode: str, dtype: torch.dtype) -> None:
    module = SparseSelfAttention(pattern(), key_padding_mask_mode=key_mode, attn_mask_mode=mode, max_seq_length=TOKENS)
    keys = torch.ones(2, TOKENS)
    keys[0, 70:] = 0
    past = torch.ones(TOKENS, TOKENS).tril()
    infinite = torch.tensor(float("-inf"))
    rpe = torch.randn(2, 4, TOKENS, TOKENS)
    tensors = attended(dtype)
    found = module(
        *tensors,
        rpe=rpe,
        key_padding_mask=(keys if key_mode == "mul" else torch.where(keys == 0, infinite, 0.0))[:, None, None],
        attn_mask=(past if mode == "mul" else torch.where(past == 0, infinite, 0.0))[None, None],
    )
    allowed = of_tokens(pattern().make_layout(TOKENS), 16) & past.bool() & keys.bool()[:, None, None]
    wanted = dense_attention(*(tensor.double() for tensor in tensors), allowed, rpe.to(dtype).double())
    assert found.dtype == dtype
    assert largest(found, wanted) <= {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]


def test_a_finite_mask_is_added() -> None:
    module = SparseSelfAttention(DenseSparsityConfig(num_heads=4), max_seq_length=TOKENS)
    keys = torch.randn(2, TOKENS)
    tensors = attended()
    wanted = dense_attention(*tensors, torch.ones(1, dtype=torch.bool), keys[:, None, None])
    assert largest(module(*tensors, key_padding_mask=keys), wanted) <= 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": torch.zeros(2, 4, 90, 16)}, "with itself"),
        ({name: torch.zeros(2, 4, 90, 16) for name in ("query", "key", "value")}, "multiple of the block"),
        ({name: torch.zeros(2, 4, 112, 16) for name in ("query", "key", "value")}, "max_seq_length=112"),
        ({name: torch.zeros(2, 2, TOKENS, 16) for name in ("query", "key", "value")}, "num_heads=2"),
        (
            {name: torch.zeros(2, 4, TOKENS, 16, dtype=torch.int32) for name in ("query", "key", "value")},
            "fp32, bf16 or fp16",
        ),
        ({"key_padding_mask": torch.ones(2, 80)}, "key_padding_mask has the shape"),
        ({"key_padding_mask": torch.ones(2, TOKENS, dtype=torch.bool)}, "bool mask cannot be added"),
        ({"attn_mask": torch.ones(2, TOKENS, TOKENS)}, "attn_mask has the shape"),
        ({"rpe": torch.ones(TOKENS, TOKENS)}, "rpe is"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    module = SparseSelfAttention(pattern(), max_seq_length=TOKENS)
    given = dict(zip(("query", "key", "value"), attended(), strict=True))
    with pytest.raises(ValueError, match=words):
        module(**{**given, **arguments})


def test_wrong_modules() -> None:
    with pytest.raises(TypeError, match="SparsityConfig has no pattern"):
        SparseSelfAttention(SparsityConfig(num_heads=4))
    with pytest.raises(ValueError, match="key_padding_mask_mode"):
        SparseSelfAttention(pattern(), key_padding_mask_mode="multiply")


def test_a_loaded_layout_is_used() -> None:
    """Random blocks are part of the module's state."""
    first, second = (
        SparseSelfAttention(BigBirdSparsityConfig(num_heads=4, num_sliding_window_blocks=1), max_seq_length=TOKENS)
        for _ in range(2)
    )
    first.master_layout[0, 5, 1] += 1 - 2 * first.master_layout[0, 5, 1]
    tensors = attended()
    assert not torch.equal(first(*tensors), second(*tensors))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(*tensors), second(*tensors))


def one_layout() -> Tensor:
    random.seed(torch.distributed.get_rank())
    module = SparseSelfAttention(BigBirdSparsityConfig(num_heads=4, num_random_blocks=2), max_seq_length=256)
    tensors = attended()
    module(*tensors)
    return module.master_layout


def test_processes_have_the_layout_of_the_first() -> None:
    random.seed(0)
    wanted = BigBirdSparsityConfig(num_heads=4, num_random_blocks=2).make_layout(256)
    for found in run_distributed(one_layout, 2, timeout=60):
        assert torch.equal(found, wanted)


# -- BERT ---------------------------------------------------------------------------------------------------------


def tiny(kind: str, implementation: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64 + 2 * (kind == "Roberta"),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=implementation,
        pad_token_id=1,
    )
    return getattr(transformers, f"{kind}ForMaskedLM")(config)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(2, 50, (2, 64))
    ids[1, 40:] = 1
    return {"input_ids": ids, "attention_mask": (ids != 1).long()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_bert_with_a_dense_pattern_is_bert(kind: str, implementation: str) -> None:
    plain = tiny(kind, implementation)
    sparse = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        copy.deepcopy(plain), 64, DenseSparsityConfig(num_heads=4)
    )
    layer = getattr(sparse, kind.lower()).encoder.layer[0].attention.self
    assert isinstance(layer, BertSparseSelfAttention)
    found, wanted = (model(**batch()).logits[0] for model in (sparse, plain))
    assert largest(found, wanted) <= 1e-6
    other = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        copy.deepcopy(plain), 64, FixedSparsityConfig(num_heads=4, num_local_blocks=2)
    )
    assert largest(other(**batch()).logits[0], wanted) > 1e-3


def test_the_layer_of_deepspeeds_bert() -> None:
    model = tiny("Bert", "sdpa")
    layer = BertSparseSelfAttention(model.config)
    hidden = torch.randn(2, 64, 32)
    found = layer(hidden, torch.zeros(2, 1, 1, 64))
    query, key, value = (layer.transpose_for_scores(part(hidden)) for part in (layer.query, layer.key, layer.value))
    allowed = of_tokens(FixedSparsityConfig(num_heads=4).make_layout(64), 16)
    assert largest(found, dense_attention(query, key, value, allowed).transpose(1, 2).flatten(2)) <= 1e-6


@pytest.mark.parametrize(("kind", "longer"), [("Bert", 128), ("Roberta", 160)])
def test_longer_sequences(kind: str, longer: int) -> None:
    model = tiny(kind, "sdpa")
    encoder = getattr(model, kind.lower())
    before = encoder.embeddings.position_embeddings.weight.detach().clone()
    reserved = 2 * (kind == "Roberta")
    model = SparseAttentionUtils.extend_position_embedding(model, longer)
    model = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, longer, FixedSparsityConfig(num_heads=4)
    )
    after = encoder.embeddings.position_embeddings.weight
    assert after.shape == (longer + reserved, 32)
    assert torch.equal(after[: 64 + reserved], before)
    assert torch.equal(after[64 + reserved : 128 + reserved], before[reserved:])
    assert model.config.max_position_embeddings == longer + reserved
    loss = model(input_ids=torch.randint(2, 50, (1, longer)), labels=torch.randint(2, 50, (1, longer))).loss
    loss.backward()
    assert torch.isfinite(loss)
    with pytest.raises(ValueError, match="positions already"):
        SparseAttentionUtils.extend_position_embedding(model, longer)


def test_padding_to_blocks() -> None:
    embeddings = torch.nn.Embedding(50, 8)
    ids = torch.randint(2, 50, (2, 30))
    found = SparseAttentionUtils.pad_to_block_size(
        16, ids, torch.ones(2, 30), None, None, embeddings(ids), 1, embeddings
    )
    added, padded, mask, types, positions, embedded = found
    assert (added, types, positions) == (2, None, None)
    assert padded[:, 30:].tolist() == [[1, 1], [1, 1]]
    assert mask.sum() == 60
    assert torch.equal(embedded, embeddings(padded))
    assert SparseAttentionUtils.unpad_sequence_output(added, embedded).shape == (2, 30, 8)
    assert SparseAttentionUtils.pad_to_block_size(10, ids, None, None, None, None, 1, None)[0] == 0


def test_the_tokenizer_truncates_later() -> None:
    tokenizer = SimpleNamespace(model_max_length=512, init_kwargs={"model_max_length": 512})
    SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 2048)
    assert (tokenizer.model_max_length, tokenizer.init_kwargs["model_max_length"]) == (2048, 2048)


def test_the_section_of_a_file() -> None:
    assert get_sparse_attention({}) is None
    assert get_sparse_attention({"sparse_attention": {"mode": "dense", "block": 32}}) == {"mode": "dense", "block": 32}
    assert get_sparse_attention({"sparse_attention": {"num_local_blocks": 8}}) == {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": False,
        "num_local_blocks": 8,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    }
    with pytest.raises(ValueError, match="bigbird"):
        get_sparse_attention({"sparse_attention": {"mode": "diagonal"}})
