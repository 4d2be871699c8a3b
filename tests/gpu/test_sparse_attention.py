"""Sparse attention by flex_attention against attention over all scores with -inf, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.ops.sparse_attention import SparseSelfAttention
from torch import Tensor

from ds_hf.engine.modules.sparse.attention import attention
from ds_hf.engine.modules.sparse.block_layout import BlockLayout
from ds_hf.engine.modules.sparse.layouts import BigBirdSparsityConfig, FixedSparsityConfig
from tests.engine.modules.sparse.reference import dense_attention, largest, of_tokens
from tests.engine.modules.sparse.test_models import FIXED, llama, sparse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Relative to the largest value, against fp64.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def differences(found: Tensor, given: list[Tensor], allowed: Tensor, bias: Tensor | None = None) -> list[float]:
    """Of the output and of all gradients."""
    leaves = [*given, *([bias] if bias is not None else [])]
    twins = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = dense_attention(*twins[:3], allowed, *twins[3:])
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64, device=wanted.device).view_as(wanted)
    (wanted * weight).sum().backward()
    (found * weight.to(found.dtype)).sum().backward()
    pairs = [(found, wanted), *((leaf.grad, twin.grad) for leaf, twin in zip(leaves, twins, strict=True))]
    return [largest(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]


def tensors(dtype: torch.dtype, length: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> list[Tensor]:
    shapes = [(2, heads, length, head_dim), (2, kv_heads, length, head_dim), (2, kv_heads, length, head_dim)]
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("per_head", [False, True])
def test_forward_and_backward(dtype: torch.dtype, block: int, per_head: bool) -> None:
    """Grouped queries, causal, padding, a row of blocks that sees nothing, a length that is no multiple of a tile."""
    length, blocks = 700, -(-700 // block)
    cells = torch.rand(4 if per_head else 1, blocks, blocks) < 0.4
    cells[:, 2] = False
    keep = torch.ones(2, 1, 1, length, dtype=torch.bool, device="cuda")
    keep[1, ..., 500:] = False
    given = tensors(dtype, length)
    found = attention(*given, BlockLayout(cells, block), keep=[keep], causal=True)
    past = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    allowed = of_tokens(cells, block)[:, :length, :length].cuda() & keep & past
    assert found[:, :, 2 * block : 3 * block].abs().max() == 0
    errors = differences(found, given, allowed)
    assert len(errors) == 4
    assert max(errors) <= BOUND[dtype], errors


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_the_module_with_masks_and_rpe(dtype: torch.dtype) -> None:
    length = 512
    config = FixedSparsityConfig(4, block=16, different_layout_per_head=True, num_different_global_patterns=4)
    module = SparseSelfAttention(config, attn_mask_mode="mul", max_seq_length=length).cuda()
    rpe = torch.randn(2, 4, length, length, device="cuda", requires_grad=True)
    keys = torch.zeros(2, length, device="cuda")
    keys[0, 400:] = float("-inf")
    past = torch.ones(length, length, device="cuda").tril()
    given = tensors(dtype, length, kv_heads=4)
    found = module(*given, rpe=rpe, key_padding_mask=keys, attn_mask=past)
    allowed = of_tokens(config.make_layout(length), 16).cuda() & past.bool() & (keys == 0)[:, None, None]
    errors = differences(found, given, allowed, rpe)
    assert len(errors) == 5
    assert max(errors) <= BOUND[dtype], errors


@pytest.mark.parametrize("asked", [True, "all"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_model_of_transformers(side: str, asked: Any) -> None:
    """Logits and gradients are those of the CPU; heads of 32, so that flex_attention computes them."""
    ids = torch.randint(1, 64, (2, 300))
    keep = torch.ones(2, 300, dtype=torch.long)
    if side != "none":
        keep[1, slice(0, 90) if side == "left" else slice(210, 300)] = 0
    results = []
    for device in ("cpu", "cuda"):
        model = sparse(llama(hidden_size=128, max_position_embeddings=512), FIXED, asked=asked).to(device)
        mask = {} if side == "none" else {"attention_mask": keep.to(device)}
        labels = ids.masked_fill(keep == 0, -100).to(device)
        out = model(ids.to(device), labels=labels, **mask)
        out.loss.backward()
        results.append((out.logits.cpu(), [parameter.grad.cpu() for parameter in model.parameters()]))
    (wanted, gradients), (found, ours) = results
    assert largest(found[keep.bool()], wanted[keep.bool()]) <= 1e-5
    for mine, theirs in zip(ours, gradients, strict=True):
        assert largest(mine, theirs) <= 3e-5


def test_nothing_of_tokens_by_tokens_is_allocated() -> None:
    length = 32768
    config = BigBirdSparsityConfig(4, block=64, attention="unidirectional")
    layout = BlockLayout(config.cells(length // 64), 64)
    given = tensors(torch.bfloat16, length)
    attention(*given, layout, causal=True).sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(*given, layout, causal=True).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 8 * sum(tensor.nbytes for tensor in given) < length * length


def test_dropout_is_refused() -> None:
    given = tensors(torch.bfloat16, 256)
    with pytest.raises(ValueError, match="attention_dropout"):
        attention(*given, None, causal=True, dropout=0.1)
