"""What of a batch is cut, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hf.data.lengths import check_batch, cut_batch, labels_left, length_of
from ds_hf.errors import DsHfError

TOKENS = torch.arange(24).view(2, 12)


def test_everything_with_positions_is_cut_together() -> None:
    batch = {
        "input_ids": TOKENS,
        "labels": TOKENS + 1,
        "attention_mask": torch.ones(2, 12),
        "position_ids": torch.arange(12).expand(3, 2, 12),
        "mask_of_layers": {"full": torch.arange(144).view(1, 1, 12, 12), "keys": torch.arange(12).view(1, 1, 1, 12)},
        "targets": torch.ones(2),
        "weights": torch.ones(2, 5),
        "name": "first",
    }
    cut = cut_batch(batch, 5)
    assert torch.equal(cut["input_ids"], TOKENS[:, :5])
    assert torch.equal(cut["labels"], TOKENS[:, :5] + 1)
    assert cut["attention_mask"].shape == (2, 5)
    assert cut["position_ids"].shape == (3, 2, 5)
    assert torch.equal(cut["mask_of_layers"]["full"], batch["mask_of_layers"]["full"][..., :5, :5])
    assert cut["mask_of_layers"]["keys"].shape == (1, 1, 1, 5)
    assert cut["targets"].shape == (2,)
    assert cut["weights"].shape == (2, 5)
    assert cut["name"] == "first"
    assert cut_batch(batch, 12) is batch
    assert length_of({"labels": torch.ones(2)}) is None


def test_embeddings_tuples_and_encodings_are_cut() -> None:
    from transformers import BatchEncoding

    assert cut_batch({"inputs_embeds": torch.ones(2, 12, 4), "labels": TOKENS}, 3)["inputs_embeds"].shape == (2, 3, 4)
    first, second = cut_batch((TOKENS, TOKENS), 4)
    assert first.shape == second.shape == (2, 4)
    cut = cut_batch(BatchEncoding({"input_ids": TOKENS}), 4)
    assert isinstance(cut, BatchEncoding)
    assert cut.input_ids.shape == (2, 4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 4, 12])}, "cu_seq_lens_q: the documents"),
        ({"seq_idx": TOKENS}, "seq_idx: the documents"),
        ({"position_ids": torch.arange(12).expand(2, 12) % 5}, "begin again inside a row"),
        ({"pixel_values": torch.ones(2, 3, 12, 12)}, "pixel_values"),
        ({"attention_mask": torch.tensor([[0] * 2 + [1] * 10, [1] * 12])}, "padding on the left"),
    ],
)
def test_what_cannot_be_cut_is_named(more: dict[str, Any], words: str) -> None:
    with pytest.raises(DsHfError, match=words):
        check_batch({"input_ids": TOKENS, **more}, "the training batches")


def test_positions_of_padding_may_begin_again() -> None:
    places = torch.tensor([[0, 1, 2, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]])
    check_batch({"input_ids": places, "position_ids": places, "attention_mask": mask}, "the training batches")


def test_documents_may_be_packed_before_padding() -> None:
    mask = torch.tensor([[1] * 9 + [0] * 3])
    given = {"input_ids": TOKENS[:1], "position_ids": torch.arange(12)[None] % 5, "attention_mask": mask}
    with pytest.raises(DsHfError, match="begin again inside a row"):
        check_batch(given, "the training batches", wait=False)


def test_labels_that_are_left() -> None:
    labels = torch.tensor([[5, -100, -100], [7, -100, 3]])
    assert bool(labels_left({"labels": labels}))
    assert not bool(labels_left({"labels": labels[:1]}))  # the first one is no target
    assert labels_left({"labels": torch.ones(2)}) is None
