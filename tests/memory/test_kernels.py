"""The kernels that torch picks on a GPU, seen on the meta device by what they keep for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.amp import autocast

from ds_hf.memory.kernels import AsOnCuda, autocast_of_meta

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 64, 8
SCORES = BATCH * HEADS * LENGTH * LENGTH


def kept(learned: bool, dropout: float, side_by_side: bool = True, length: int = LENGTH) -> dict[str, int]:
    """Bytes that attention with a bias keeps of tensors of all scores, and of a copy of the bias with longer rows."""
    sizes: dict[str, dict[int, int]] = {"scores": {}, "longer": {}}
    scores = BATCH * HEADS * length * length

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() == scores:
            which = "scores" if storage.nbytes() == tensor.nbytes else "longer"
            sizes[which][storage._cdata] = storage.nbytes()
        return tensor

    query, key, value = (
        torch.empty(BATCH, HEADS, length, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    bias = torch.empty(BATCH, HEADS, length, length, dtype=torch.bfloat16, device="meta", requires_grad=learned)
    with AsOnCuda(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        given = bias if side_by_side else bias.transpose(-1, -2)
        result = F.scaled_dot_product_attention(query, key, value, given, dropout)
    assert result.shape == query.shape
    assert result.dtype == query.dtype
    return {which: sum(found.values()) for which, found in sizes.items()}


@pytest.mark.parametrize(
    ("learned", "dropout", "side_by_side", "each"),
    [
        (False, 0.0, True, 2),  # the bias itself
        (True, 0.1, True, 2),
        (True, 0.0, False, 4),  # the softmax in fp32, which the product with the values needs too
        (True, 0.1, False, 4 + 1 + 4),  # the softmax, what dropout dropped, and what it left
    ],
)
def test_what_lies_otherwise_keeps_the_scores(learned: bool, dropout: float, side_by_side: bool, each: int) -> None:
    """`torch._fused_sdp_choice` on an H200, torch 2.11: a bias is fused, learned or not, if its rows lie whole."""
    assert kept(learned, dropout, side_by_side) == {"scores": SCORES * each, "longer": 0}


def test_rows_that_begin_amid_a_vector_are_copied() -> None:
    assert kept(True, 0.0, length=61) == {"scores": 0, "longer": BATCH * HEADS * 61 * 64 * 2}


def test_autocast_of_the_meta_device_by_any_name() -> None:
    """Models import it from ``torch.amp``, too; outside all is as before."""
    own = torch.autocast.__init__
    with autocast_of_meta():
        for name in (torch.autocast, autocast):
            with name("meta", dtype=torch.bfloat16, enabled=False):
                assert not torch.is_autocast_enabled("cpu")
        with autocast("cpu", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cpu")
    assert torch.autocast.__init__ is own
    with pytest.raises(RuntimeError):
        autocast("meta")
