"""Which tokens are kept, and what belongs to them."""

from __future__ import annotations

import pytest
import torch

from ds_hf.data.layer_tokens import draw, put, select, take
from ds_hf.errors import DsHfError

CPU = torch.device("cpu")
PLACES = torch.tensor([[0, 2, 5], [1, 2, 3]])


def test_places_rise_are_evenly_likely_and_follow_from_the_seed() -> None:
    places = draw(2000, 8, 4, 7, CPU)
    assert bool((places[:, 1:] > places[:, :-1]).all())
    share = torch.bincount(places.flatten(), minlength=8) / 2000
    assert bool((share - 0.5).abs().max() < 0.05)
    assert torch.equal(places, draw(2000, 8, 4, 7, CPU))
    assert not torch.equal(places, draw(2000, 8, 4, 8, CPU))


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_taken_and_put_back(dim: int) -> None:
    hidden = torch.randn(2, 6, 3, requires_grad=True)
    given = hidden if dim == 1 else hidden.transpose(0, 1)
    rows = take(given, PLACES, dim)
    wanted = torch.stack([hidden[0, PLACES[0]], hidden[1, PLACES[1]]])
    assert torch.equal(rows if dim == 1 else rows.transpose(0, 1), wanted)
    whole = put(given, rows * 2, PLACES, dim)
    expected = hidden.detach().clone()
    for sample in range(2):
        expected[sample, PLACES[sample]] *= 2
    assert torch.equal(whole if dim == 1 else whole.transpose(0, 1), expected)
    whole.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.sum().item() == 3 * (2 * 6 + 6)


def test_masks_positions_and_rotary_embeddings_are_those_of_kept_tokens() -> None:
    full = torch.arange(36).view(1, 1, 6, 6)
    found = select("attention_mask", full, PLACES, 6)
    assert found.shape == (2, 1, 3, 3)
    assert torch.equal(found[1, 0], full[0, 0][1:4, 1:4])
    assert torch.equal(select("attention_mask", torch.arange(12).view(2, 6), PLACES, 6)[1], torch.tensor([7, 8, 9]))
    assert select("attention_mask", torch.ones(2, 1, 1, 6), PLACES, 6).shape == (2, 1, 1, 3)
    assert torch.equal(select("keys", full, PLACES, 6, mask="keys"), found)
    assert torch.equal(select("position_ids", torch.arange(6)[None], PLACES, 6), PLACES)
    assert select("position_ids", torch.zeros(3, 2, 6), PLACES, 6).shape == (3, 2, 3)
    cos, sin = select("position_embeddings", (torch.arange(24.0).view(1, 6, 4), torch.zeros(2, 6, 4)), PLACES, 6)
    assert torch.equal(cos[0, 2], torch.arange(20.0, 24.0))
    assert sin.shape == (2, 3, 4)
    assert select("use_cache", True, PLACES, 6) is True
    assert select("position_embeddings", None, PLACES, 6) is None


@pytest.mark.parametrize("name", ["alibi", "cu_seq_lens_q"])
def test_what_is_not_known_is_named(name: str) -> None:
    with pytest.raises(DsHfError, match=name):
        select(name, torch.zeros(2, 1, 6), PLACES, 6)
