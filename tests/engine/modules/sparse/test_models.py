"""``"ds_hf": {"sparse_attention": ...}``: unmodified models of transformers against the same ones with dense masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.config import load_config
from ds_hf.engine.modules.sparse.choice import Patterns
from ds_hf.engine.modules.sparse.models import prepare_attention
from ds_hf.engine.parallel.sequence.losses import mean_over_tokens
from ds_hf.errors import ConfigError
from tests.engine.modules.sparse.reference import largest, of_tokens
from tests.helpers.distributed import run_distributed

FIXED = {"mode": "fixed", "block": 4, "num_local_blocks": 2, "attention": "unidirectional"}

PER_HEAD = {**FIXED, "num_local_blocks": 4, "different_layout_per_head": True, "num_different_global_patterns": 4}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def llama(kind: str = "Llama", **changes: Any) -> Any:
    import transformers

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
        "pad_token_id": 0,
        **changes,
    }
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))


def sparse(model: nn.Module, section: dict[str, Any] | None = FIXED, asked: Any = True) -> nn.Module:
    file: dict[str, Any] = {"train_batch_size": 1, "ds_hf": {"sparse_attention": asked}}
    prepare_attention(load_config(file if section is None else {**file, "sparse_attention": section}), model)
    return model


def added(allowed: Tensor) -> Tensor:
    """The mask of scores that eager attention adds."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


def section_of(section: dict[str, Any]) -> Any:
    return load_config({"train_batch_size": 1, "sparse_attention": section}).sparse_attention


def layout_of(section: dict[str, Any], length: int, layer: int = 0) -> Tensor:
    made = Patterns(section_of(section), 4).layout(length, layer)
    return of_tokens(made.cells, made.block)[:, :length, :length]


def past(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "section",
    [
        FIXED,
        {**FIXED, "different_layout_per_head": True, "num_different_global_patterns": 2},
        {"mode": "bslongformer", "block": 8},
        {"mode": "variable", "block": 4, "local_window_blocks": [1, 2], "global_block_indices": [3]},
        {"mode": "local_sliding_window", "block": 4},
    ],
    ids=lambda section: section["mode"],
)
@pytest.mark.parametrize("length", [48, 37])
def test_a_causal_model(section: dict[str, Any], length: int) -> None:
    """Logits and gradients, with grouped queries, at a length that ends within a block, too."""
    ids = torch.randint(1, 64, (2, length))
    dense, ours = llama(), sparse(llama(), section)
    allowed = (layout_of(section, length) & past(length)).expand(2, 4, length, length)
    wanted = dense(ids, attention_mask=added(allowed), labels=ids)
    found = ours(ids, labels=ids)
    assert largest(found.logits, wanted.logits) <= 1e-6
    for result in (wanted, found):
        result.loss.backward()
    for mine, theirs in zip(ours.parameters(), dense.parameters(), strict=True):
        assert largest(mine.grad, theirs.grad) <= 3e-6
    assert largest(llama()(ids).logits, wanted.logits) > 1e-3, "the pattern leaves something out"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    ids = torch.randint(1, 64, (2, 40))
    keep = torch.ones(2, 40, dtype=torch.long)
    keep[1, : 9 if side == "left" else 40] = 0 if side == "left" else 1
    if side == "right":
        keep[1, 31:] = 0
    allowed = layout_of(FIXED, 40) & past(40) & keep.bool()[:, None, None]
    positions = (keep.cumsum(1) - 1).clamp_min(0)
    wanted = llama()(ids, attention_mask=added(allowed.expand(2, 4, 40, 40)), position_ids=positions).logits
    found = sparse(llama())(ids, attention_mask=keep, position_ids=positions).logits
    assert largest(found[keep.bool()], wanted[keep.bool()]) <= 1e-6


def test_packed_documents() -> None:
    ids = torch.randint(1, 64, (1, 40))
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None]
    document = (torch.arange(40) >= 24).long()
    allowed = layout_of(FIXED, 40) & past(40) & (document[:, None] == document[None, :])
    wanted = llama()(ids, attention_mask=added(allowed.expand(1, 4, 40, 40)), position_ids=positions).logits
    found = sparse(llama())(ids, position_ids=positions, use_cache=False).logits
    assert largest(found, wanted) <= 1e-6


@pytest.mark.parametrize("asked", [True, "all"])
def test_sliding_windows(asked: Any) -> None:
    """One layer of full attention, one with a window of 6."""
    changes = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
    ids = torch.randint(1, 64, (1, 40))
    distance = torch.arange(40)[:, None] - torch.arange(40)[None, :]
    window = (past(40) & (distance < 6)).expand(1, 1, 40, 40)
    layout = layout_of(FIXED, 40)
    masks = {
        "full_attention": added((layout & past(40)).expand(1, 4, 40, 40)),
        "sliding_attention": added((layout & window if asked == "all" else window).expand(1, 4, 40, 40)),
    }
    wanted = llama("Qwen2", **changes)(ids, attention_mask=masks).logits
    found = sparse(llama("Qwen2", **changes), asked=asked)(ids).logits
    assert largest(found, wanted) <= 1e-6


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation="eager",
    )


def test_an_encoder() -> None:
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    plain = BertForMaskedLM(bert_config())
    torch.manual_seed(0)
    ours = BertForMaskedLM(bert_config())
    section = {"mode": "bslongformer", "block": 8}
    sparse(ours, section)
    ids, keep = torch.randint(1, 64, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    keep[1, 30:] = 0
    allowed = layout_of(section, 40) & keep.bool()[:, None, None]
    wanted = plain(ids, attention_mask=added(allowed.expand(2, 4, 40, 40))).logits
    found = ours(ids, attention_mask=keep).logits
    assert largest(found[keep.bool()], wanted[keep.bool()]) <= 1e-6
    whole = plain(ids, attention_mask=added(layout_of(section, 40).expand(2, 4, 40, 40))).logits
    assert largest(ours(ids).logits, whole) <= 1e-6  # no mask at all


def test_generation_sees_the_pattern() -> None:
    """With a cache of keys, token by token, as without."""
    model = sparse(llama()).eval()
    ids = torch.randint(1, 64, (2, 21))
    kept = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True)
    again = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)
    assert torch.equal(kept, again)
    assert kept.shape == (2, 33)


def test_random_blocks_differ_by_layer_and_not_by_run() -> None:
    section = section_of({"mode": "bigbird", "block": 4, "num_random_blocks": 2})
    first, second = Patterns(section, 4), Patterns(section, 4)
    assert torch.equal(first.layout(128, 1).cells, second.layout(126, 1).cells)
    assert not torch.equal(first.layout(128, 1).cells, first.layout(128, 2).cells)
    assert first.layout(128, 1) is first.layout(128, 1)


def test_the_default_pattern_and_two_models_at_once() -> None:
    ids = torch.randint(1, 64, (1, 128))
    one, other = sparse(llama(), None), sparse(llama(), {"mode": "dense"})
    plain = llama()(ids).logits
    assert largest(other(ids).logits, plain) <= 1e-6
    assert largest(one(ids).logits, plain) > 1e-3
    assert largest(other(ids).logits, plain) <= 1e-6


def test_a_model_of_the_same_configuration_stays_dense() -> None:
    dense = llama(attn_implementation="sdpa")
    model = type(dense)(dense.config)
    ids = torch.randint(1, 64, (2, 24))
    before = dense(ids).logits
    sparse(model)
    assert torch.equal(dense(ids).logits, before)
    assert model.config is model.model.config is model.model.layers[0].self_attn.config
    assert model.config._attn_implementation != dense.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("make", "asked", "words"),
    [
        (lambda: nn.Linear(2, 2), True, "SparseSelfAttention"),
        (lambda: llama("Mistral", sliding_window=8), True, '"all"'),
        (lambda: llama("Gemma2", head_dim=8), "all", "softcapping"),
        (lambda: llama(output_attentions=True), True, "attention maps"),
    ],
)
def test_models_that_cannot(make: Any, asked: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sparse(make(), asked=asked)


def test_encoder_decoders_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="encoder-decoder"):
        sparse(model)


def divided_losses(keys: dict[str, Any]) -> list[float]:
    """Losses of three steps with a layout of its own for every head, of as many processes as there are."""
    import deepspeed

    torch.manual_seed(0)
    model = llama()
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "sparse_attention": PER_HEAD,
        "ds_hf": {"sparse_attention": True},
        **keys,
    }
    engine, *_ = deepspeed.initialize(model=model, config=file)
    tokens = torch.randint(0, 32, (2, 32), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(32)[None].expand(2, -1)
    parts = engine.mesh.shape.sequence
    batch = {"input_ids": tokens, "labels": labels, "shift_labels": labels, "position_ids": positions}
    if parts > 1:
        place = engine.mesh.axis("sequence").rank
        batch = {name: value.chunk(parts, 1)[place].contiguous() for name, value in batch.items()}
    found = []
    for _ in range(3):
        out = engine(**batch)
        loss = out.loss
        if parts > 1:
            count = (batch["shift_labels"] != -100).sum()
            loss = mean_over_tokens(loss, count, engine.mesh.axis("sequence"))
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


@pytest.mark.parametrize("keys", [{"sequence_parallel_size": 2}, {"tensor_parallel": {"autotp_size": 2}}])
def test_divided_heads_keep_their_layouts(keys: dict[str, Any]) -> None:
    cells = Patterns(section_of(PER_HEAD), 4).layout(32, 0).cells
    assert len({tuple(head.flatten().tolist()) for head in cells}) == 4
    whole = run_distributed(divided_losses, 1, {})[0]
    for found in run_distributed(divided_losses, 2, keys):
        assert found == pytest.approx(whole, rel=1e-5)


def trained(stage: int) -> list[float]:
    import deepspeed

    torch.manual_seed(0)
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "sparse_attention": FIXED,
        "ds_hf": {"sparse_attention": True},
    }
    model = llama()
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=file)
    losses = []
    for step in range(4):
        ids = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(step))[dist.get_rank()][None]
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_at_stage_3_is_that_of_stage_0() -> None:
    plain, divided = (run_distributed(trained, 2, stage, timeout=90) for stage in (0, 3))
    assert largest(torch.tensor(divided), torch.tensor(plain)) <= 1e-6
    assert plain[0][-1] != plain[0][0]
