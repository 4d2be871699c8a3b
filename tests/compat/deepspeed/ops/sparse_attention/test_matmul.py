"""Block-sparse products and softmax against dense ones, values and gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from deepspeed.ops.sparse_attention.matmul import MatMul
from deepspeed.ops.sparse_attention.softmax import Softmax
from torch import Tensor

from tests.engine.modules.sparse.reference import of_tokens

BLOCK, HEADS, ROWS, COLUMNS, INNER, BATCH = 4, 3, 5, 6, 7, 2


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def layout() -> Tensor:
    made = (torch.rand(HEADS, ROWS, COLUMNS) < 0.4).long()
    made[0, 1] = 0  # a row without blocks
    return made


def blocks_of(dense: Tensor, cells: Tensor) -> Tensor:
    places = [
        dense[:, head, row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        for head, row, column in cells.nonzero().tolist()
    ]
    return torch.stack(places, 1)


def random(*shape: int) -> Tensor:
    return torch.randn(BATCH, HEADS, *shape, dtype=torch.float64, requires_grad=True)


def turned(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.transpose(-2, -1) if transposed else tensor


def same(found: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    assert torch.allclose(found, wanted, atol=1e-12)
    weight = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, weight, retain_graph=True),
        torch.autograd.grad(wanted, leaves, weight, retain_graph=True),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-12)


@pytest.mark.parametrize(("trans_a", "trans_b"), [*product([False, True], repeat=2)])
def test_products(trans_a: bool, trans_b: bool) -> None:
    cells = layout()
    kept = of_tokens(cells, BLOCK)
    a = random(*((INNER, ROWS * BLOCK) if trans_a else (ROWS * BLOCK, INNER)))
    b = random(*((COLUMNS * BLOCK, INNER) if trans_b else (INNER, COLUMNS * BLOCK)))
    found = MatMul(cells, BLOCK, "sdd", trans_a=trans_a, trans_b=trans_b)(a, b)
    same(found, blocks_of(turned(a, trans_a) @ turned(b, trans_b), cells), [a, b])

    matrix = random(ROWS * BLOCK, COLUMNS * BLOCK)
    sparse = blocks_of(matrix, cells)
    whole = matrix * kept
    inner = (ROWS if trans_a else COLUMNS) * BLOCK
    b = random(*((INNER, inner) if trans_b else (inner, INNER)))
    found = MatMul(cells, BLOCK, "dsd", trans_a=trans_a, trans_b=trans_b)(sparse, b)
    same(found, turned(whole, trans_a) @ turned(b, trans_b), [matrix, b])

    inner = (COLUMNS if trans_b else ROWS) * BLOCK
    a = random(*((inner, INNER) if trans_a else (INNER, inner)))
    found = MatMul(cells, BLOCK, "dds", trans_a=trans_a, trans_b=trans_b)(a, sparse)
    same(found, turned(a, trans_a) @ turned(whole, trans_b), [matrix, a])


@pytest.mark.parametrize(("key_mode", "mode"), [*product(["add", "mul"], repeat=2)])
def test_softmax(key_mode: str, mode: str) -> None:
    cells = layout()
    kept = of_tokens(cells, BLOCK)
    matrix, rpe = (random(ROWS * BLOCK, COLUMNS * BLOCK) for _ in range(2))
    keys = (torch.rand(BATCH, COLUMNS * BLOCK) < 0.8).double()
    scores = (torch.rand(ROWS * BLOCK, COLUMNS * BLOCK) < 0.9).double()
    found = Softmax(cells, BLOCK)(
        blocks_of(matrix, cells),
        scale=0.5,
        rpe=rpe,
        key_padding_mask=keys,
        attn_mask=scores,
        key_padding_mask_mode=key_mode,
        attn_mask_mode=mode,
    )
    wanted = 0.5 * matrix + rpe
    for mask, how in ((keys[:, None, None], key_mode), (scores, mode)):
        wanted = wanted + mask if how == "add" else wanted.masked_fill(mask == 0, float("-inf"))
    wanted = wanted.masked_fill(~kept, float("-inf"))
    empty = (wanted == float("-inf")).all(-1, keepdim=True)
    wanted = torch.softmax(wanted.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    same(found, blocks_of(wanted, cells), [matrix, rpe])


def test_sixteen_bits_and_missing_dims() -> None:
    cells = torch.ones(2, 3)
    a, b = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16, 12, dtype=torch.bfloat16)
    found = MatMul(cells, 4, "sdd")(a, b)
    assert found.shape == (6, 4, 4) or found.shape == (1, 6, 4, 4)
    softmax = Softmax(cells, 4)(found.reshape(1, 6, 4, 4))
    assert softmax.dtype == torch.bfloat16
    assert torch.allclose(softmax.view(2, 3, 4, 4).sum((1, 3)).float(), torch.ones(2, 4), atol=2e-2)


def test_wrong_arguments() -> None:
    cells = layout()
    with pytest.raises(ValueError, match="sdd, dsd, dds"):
        MatMul(cells, BLOCK, "ddd")
    with pytest.raises(ValueError, match="a and b differ"):
        MatMul(cells, BLOCK, "sdd")(torch.zeros(1), torch.zeros(1).half())
    with pytest.raises(ValueError, match="is expected"):
        MatMul(cells, BLOCK, "dsd")(torch.zeros(1, 3, 4, 4), torch.zeros(1, HEADS, COLUMNS * BLOCK, 2))
    sparse = torch.zeros(1, int(cells.sum()), BLOCK, BLOCK)
    with pytest.raises(ValueError, match="they have to be the same"):
        Softmax(cells, BLOCK)(sparse, attn_mask=torch.zeros(ROWS * BLOCK, COLUMNS * BLOCK).half())
