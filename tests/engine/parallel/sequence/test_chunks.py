"""Attention in chunks of heads that travel one beside the other: values and gradients of whole attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.sequence.chunks import ChunkedHeads
from tests.engine.comm.test_peer_exchanges import exchanges_in_files
from tests.helpers.distributed import run_distributed

Shapes = tuple[int, int]  # heads and key heads of each process


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def differences(folder: str, shapes: Shapes, checkpointed: bool) -> float:
    """The largest one over three layers, of what comes out and of the gradients of what went in."""
    axis = axis_of(None, "sequence")
    n, rank = axis.world_size, axis.rank
    copies = exchanges_in_files(axis, folder)
    tokens, dim = 4, 8
    widths = [each * n * dim for each in (shapes[0], shapes[1], shapes[1])]
    weights = [
        [drawn(widths[0], width, seed=10 * layer + each) for each, width in enumerate(widths)] for layer in range(3)
    ]
    hidden = drawn(2, n * tokens, widths[0], seed=99)
    weight = drawn(2, n * tokens, widths[0], seed=98)

    def heads(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w / w.shape[0] ** 0.5).unflatten(-1, (-1, dim)).transpose(1, 2)

    def whole_layer(x: Tensor, layer: int) -> Tensor:
        return x + attention(*(heads(x, w) for w in weights[layer])).flatten(2)

    def divided_layer(x: Tensor, layer: int) -> Tensor:
        there, back = ChunkedHeads(copies, 1, 2, 2, "heads"), ChunkedHeads(copies, 2, 1, 2, "context")
        leaving = []
        for chunk, coming in enumerate(there.spread([heads(x, w) for w in weights[layer]])):
            leaving.append(back.send(chunk, attention(*there.arrived(chunk, coming))))
        return x + back.collected(leaving).flatten(2)

    x = expected = hidden.clone().requires_grad_()
    mine = y = hidden.chunk(n, 1)[rank].clone().requires_grad_()
    for layer in range(3):
        expected = whole_layer(expected, layer)
        y = checkpoint(divided_layer, y, layer, use_reentrant=False) if checkpointed else divided_layer(y, layer)
    (expected * weight).sum().backward()
    (y * weight.chunk(n, 1)[rank]).sum().backward()
    with torch.no_grad():
        divided_layer(mine, 0)  # without gradients, too
    assert mine.grad is not None
    assert x.grad is not None
    found = [y - expected.chunk(n, 1)[rank], mine.grad - x.grad.chunk(n, 1)[rank]]
    return max(float(each.abs().max()) for each in found)


@pytest.mark.parametrize(
    ("ranks", "shapes", "checkpointed"), [(2, (4, 2), True), (2, (2, 2), False), (3, (4, 2), False)]
)
def test_chunks_attend_as_the_whole(tmp_path: Path, ranks: int, shapes: Shapes, checkpointed: bool) -> None:
    assert max(run_distributed(differences, ranks, str(tmp_path), shapes, checkpointed)) < 1e-12
