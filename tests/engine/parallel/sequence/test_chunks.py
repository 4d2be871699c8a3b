"""Attention in chunks of heads that travel one beside the other: values and gradients of whole attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_hf.deepspeed_api.sequence import attention as attention_of_models
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.sequence.chunks import ChunkedHeads
from tests.contract import test_sequence_parity
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


def in_chunks(folder: str, **more: Any) -> tuple[list[float], int]:
    """Of a Llama whose attention gets its heads in chunks, and how many exchanges that took."""
    copies = exchanges_in_files(axis_of(None, "sequence"), folder)
    own: Any = attention_of_models
    own.exchanges_for, own._LEAST_TOKENS = lambda axis, tensor, nbytes: copies, 0
    errors = test_sequence_parity.gradients_of_stages([0, 3], 2, kv_heads=4, **more)
    return errors, copies._count


@pytest.mark.parametrize("more", [{}, {"checkpointing": True}], ids=["kept", "computed again"])
def test_a_model_attends_in_chunks(tmp_path: Path, more: dict[str, Any]) -> None:
    for errors, exchanges in run_distributed(in_chunks, 2, str(tmp_path), timeout=90, **more):
        assert exchanges > 0
        assert max(errors) < 1e-12
