"""Attention over a layout against attention over all scores with -inf; BlockMasks tile by tile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.modules.sparse.attention import attention
from ds_hf.engine.modules.sparse.block_layout import TILE, BlockLayout
from ds_hf.engine.modules.sparse.tiled import block_mask_of, tensor_of
from tests.engine.modules.sparse.reference import dense_attention, largest, of_tokens

CPU = torch.device("cpu")
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, length: int = 80) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = [(2, heads, length, 16), (2, kv_heads, length, 16), (2, kv_heads, length, 16)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def both(tensors: list[Tensor], allowed: Tensor, bias: Tensor | None, found: Tensor) -> list[float]:
    """Differences of the output and of each gradient from those of dense attention in fp64."""
    twins = [tensor.detach().double().requires_grad_() for tensor in tensors]
    extra = [] if bias is None else [bias.detach().double().requires_grad_()]
    wanted = dense_attention(*twins[:3], allowed, *extra)
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    (wanted * weight).sum().backward()
    (found * weight.to(found.dtype)).sum().backward()
    pairs = [(found, wanted), *((mine.grad, theirs.grad) for mine, theirs in zip(tensors, twins, strict=True))]
    if bias is not None and bias.requires_grad:
        pairs.append((bias.grad, extra[0].grad))
    return [largest(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward(dtype: torch.dtype, per_head: bool, causal: bool) -> None:
    cells = torch.rand(4 if per_head else 1, 5, 5) < 0.5
    cells[:, 2] = False  # queries that see nothing
    keep = torch.ones(2, 1, 1, 80, dtype=torch.bool)
    keep[1, ..., 60:] = False
    tensors = inputs(dtype)
    found = attention(*tensors, BlockLayout(cells, 16), keep=[keep], causal=causal)
    allowed = of_tokens(cells, 16) & keep
    if causal:
        allowed = allowed & torch.ones(80, 80, dtype=torch.bool).tril()
    assert found.dtype == dtype
    assert found[:, :, 32:48].abs().max() == 0
    differences = both(tensors, allowed, None, found)
    assert len(differences) == 4
    assert max(differences) <= BOUND[dtype], differences


def test_a_bias_has_a_gradient() -> None:
    bias = torch.randn(1, 4, 80, 80, requires_grad=True)
    cells = torch.rand(1, 5, 5) < 0.7
    tensors = inputs(torch.float32)
    found = attention(*tensors, BlockLayout(cells, 16), bias=[bias])
    differences = both(tensors, of_tokens(cells, 16), bias, found)
    assert len(differences) == 5
    assert max(differences) <= 1e-6, differences


def test_a_few_queries_at_the_end() -> None:
    """As with a cache of keys: the layout goes by the position in the sequence."""
    cells = torch.rand(1, 5, 5) < 0.5
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    whole = attention(query, key, value, BlockLayout(cells, 16))
    last = attention(query[:, :, 70:], key, value, BlockLayout(cells, 16))
    assert largest(last, whole[:, :, 70:]) <= 1e-6
    middle = attention(query[:, :, 30:40], key, value, BlockLayout(cells, 16), starts=(30, 0))
    assert largest(middle, whole[:, :, 30:40]) <= 1e-6


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": torch.zeros(1, 4, 16, 16, dtype=torch.int64)}, "fp32, bf16 or fp16"),
        ({"query": torch.zeros(1, 3, 16, 16)}, "4 heads and query 3"),
        ({"query": torch.zeros(1, 4, 8, 16), "causal": True}, "as many keys"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], words: str) -> None:
    other = torch.zeros(1, 4, 16, 16)
    arguments = {"query": other, "key": other, "value": other, **changed}
    with pytest.raises(ValueError, match=words):
        attention(**arguments, layout=BlockLayout(torch.ones(4, 1, 1), 16))


# -- tiles --------------------------------------------------------------------------------------------------------


def mask_of_batch(kind: str, length: int) -> tuple[list[Any], Tensor]:
    """A ``keep``, and the same as a tensor."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch.manual_seed(2)
    if kind == "keys":
        keep = torch.rand(2, 1, 1, length) < 0.8
        keep[..., TILE:] = False
        return [keep], keep
    if kind == "scores":
        keep = torch.rand(1, 1, length, length) < 0.8
        keep[..., :TILE, :TILE] = True
        return [keep], keep
    if kind == "BlockMask":
        lengths = torch.tensor([100, length])
        mask = create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, length, length, device="cpu")
        return [mask], (torch.arange(length) < lengths[:, None])[:, None, None]
    return [], torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("kind", ["none", "keys", "scores", "BlockMask"])
@pytest.mark.parametrize("block", [16, 48, 128, 256])
def test_tiles_leave_out_nothing(block: int, kind: str) -> None:
    for length, causal in itertools.product((256, 300), (False, True)):
        keep, kept = mask_of_batch(kind, length)
        cells = torch.rand(4, -(-length // block), -(-length // block)) < 0.4
        allowed = (of_tokens(cells, block)[:, :length, :length] & kept).expand(2, 4, length, length)
        if causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
        mask = block_mask_of(length, CPU, BlockLayout(cells, block), keep, causal)
        assert torch.equal(tensor_of(mask, CPU).expand_as(allowed), allowed)
        side = -(-length // TILE)
        padded = torch.nn.functional.pad(allowed, (0, side * TILE - length, 0, side * TILE - length))
        tiled = padded.reshape(2, 4, side, TILE, side, TILE).transpose(3, 4).flatten(4)
        listed = mask.to_dense().bool().expand(2, 4, side, side)
        full = torch.zeros(2, 4, side, side, dtype=torch.bool)
        numbers, order = (
            part.expand(2, 4, *part.shape[2:]) for part in (mask.full_kv_num_blocks, mask.full_kv_indices)
        )
        full.scatter_(-1, order.long(), torch.arange(side) < numbers[..., None])
        assert not (tiled.any(-1) & ~listed).any(), "a score that counts is left out"
        assert not (full & ~tiled.all(-1)).any(), "a score that does not count is in a full tile"
        if kind == "none":
            assert torch.equal(listed, tiled.any(-1)) or causal
            assert torch.equal(full, tiled.all(-1))


def test_a_sparse_layout_has_few_tiles() -> None:
    """What the time on a GPU is in proportion to."""
    cells = torch.eye(64, dtype=torch.bool)[None]
    mask = block_mask_of(64 * 128, CPU, BlockLayout(cells, 128), [], False)
    assert int(mask.kv_num_blocks.sum()) == 0
    assert int(mask.full_kv_num_blocks.sum()) == 64


def test_a_mask_is_made_once_for_all_layers() -> None:
    keep, _ = mask_of_batch("BlockMask", 256)
    layout = BlockLayout(torch.ones(1, 16, 16), 16)
    assert block_mask_of(256, CPU, layout, keep, True) is block_mask_of(256, CPU, layout, keep, True)
    assert block_mask_of(256, CPU, None, keep, False) is keep[0]
