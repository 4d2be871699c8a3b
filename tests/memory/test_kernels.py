"""The kernels that torch picks on a GPU, seen on the meta device by what they keep for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ds_hf.memory.kernels import AsOnCuda

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 64, 8
SCORES = BATCH * HEADS * LENGTH * LENGTH


def kept(learned: bool, dropout: float) -> int:
    """Bytes of the scores' size that attention with a bias keeps."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == SCORES:
            sizes[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    query, key, value = (
        torch.empty(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    bias = torch.empty(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16, device="meta", requires_grad=learned)
    with AsOnCuda(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = F.scaled_dot_product_attention(query, key, value, bias, dropout)
    assert result.shape == query.shape
    assert result.dtype == query.dtype
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("learned", "dropout", "each"),
    [
        (False, 0.0, 2),  # the bias itself
        (True, 0.0, 4),  # the softmax in fp32, which the product with the values needs too
        (True, 0.1, 4 + 1 + 4),  # the softmax, what dropout dropped, and what it left
    ],
)
def test_a_learned_bias_keeps_the_scores(learned: bool, dropout: float, each: int) -> None:
    """No fused kernel gives the gradient of a bias: T5 keeps all scores, twice in fp32."""
    assert kept(learned, dropout) == SCORES * each
