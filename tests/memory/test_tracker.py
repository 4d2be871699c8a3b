"""Live bytes on the meta device, and the kernels that a GPU would run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ds_hf.memory.kernels import AsOnCuda, workspace
from ds_hf.memory.tracker import Kind, LiveTensors, rounded


class Seen:
    """The most that was live."""

    def __init__(self) -> None:
        self.most, self.scratch = 0, 0

    def __call__(self, live: list[int], scratch: int) -> None:
        self.most, self.scratch = max(self.most, sum(live) + scratch), max(self.scratch, scratch)


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def test_counts_from_the_operator_to_the_last_reference() -> None:
    seen = Seen()
    weight = meta(256)
    tracker = LiveTensors(seen)
    tracker.ignore(weight)
    with tracker:
        first = weight + 1  # 1024 bytes
        second = first * 2
        view = second.view(16, 16)
        assert sum(tracker.live) == 2048
        del first, second
        assert sum(tracker.live) == 1024, "the view holds its storage"
        del view
        small = meta(1) + 1
        assert sum(tracker.live) == 512, "a block of the allocator, and no more for what was summed"
        del small
    assert seen.most == 2048


def test_rounds_as_the_allocator() -> None:
    assert [rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_kinds() -> None:
    tracker = LiveTensors(lambda live, scratch: None, wide=64)
    leaf = meta(8, 64, grad=True)
    tracker.ignore(leaf)
    with tracker:
        wide = leaf * 2
        narrow = wide.sum(dim=-1).exp()
        assert tracker.live[Kind.LOGITS] == 2048
        assert tracker.live[Kind.ACTIVATIONS] == 512
        narrow.sum().backward()
        assert leaf.grad is not None
        tracker.relabel(leaf.grad, Kind.GRADIENTS)
    assert tracker.live[Kind.GRADIENTS] == 2048


def test_a_question_about_values_is_answered_as_for_a_batch_without_padding() -> None:
    with LiveTensors(lambda live, scratch: None):
        assert bool(meta(4).bool().all())


@pytest.mark.parametrize("masked", [False, True])
def test_attention_keeps_no_scores(masked: bool) -> None:
    """Flash and memory-efficient attention: one fp32 number a row; the bias of a mask has one plane."""
    batch, heads, length, width = 2, 4, 512, 64
    query, key, value = (meta(batch, heads, length, width, dtype=torch.bfloat16, grad=True) for _ in range(3))
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device="meta") if masked else None
    tracker = LiveTensors(lambda live, scratch: None)
    with tracker, AsOnCuda():
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not masked)
    output, rows = batch * heads * length * width * 2, batch * heads * length * 4
    bias = batch * length * length * 2 if masked else 0
    assert output + rows + bias <= sum(tracker.live) <= output + rows + bias + 2048
    assert result.shape == query.shape


def test_attention_with_grouped_heads_in_fp32_has_scores_as_on_cuda() -> None:
    query, key = meta(1, 8, 256, 64, grad=True), meta(1, 2, 256, 64, grad=True)
    tracker = LiveTensors(lambda live, scratch: None)
    with tracker, AsOnCuda():
        kept = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    assert sum(tracker.live) > 8 * 256 * 256 * 4
    assert kept.requires_grad


def test_dropout_keeps_a_byte_an_element() -> None:
    tracker = LiveTensors(lambda live, scratch: None)
    leaf = meta(1024, dtype=torch.bfloat16, grad=True)
    with tracker, AsOnCuda():
        kept = F.dropout(leaf, 0.1)
    assert sum(tracker.live) == 2048 + 1024
    assert kept.dtype is torch.bfloat16


def test_softmax_in_fp32_makes_no_copy_first() -> None:
    seen = Seen()
    leaf = meta(64, 64, dtype=torch.bfloat16, grad=True)
    tracker = LiveTensors(seen)
    tracker.ignore(leaf)
    with tracker, AsOnCuda():
        assert F.softmax(leaf, dim=-1, dtype=torch.float32).dtype is torch.float32
    assert seen.most == 64 * 64 * 4


def test_workspace_of_attention_backward() -> None:
    """The query's gradient in fp32: [2, 4, 512, 64], and one number a row; grouped heads expanded in 16 bits."""
    query, key = meta(2, 4, 512, 64, dtype=torch.bfloat16), meta(2, 1, 512, 64, dtype=torch.bfloat16)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    assert workspace(backward, (query, query, query)) == 2 * 4 * 512 * (64 + 1) * 4
    assert workspace(backward, (query, query, key)) == 2 * 4 * 512 * (64 + 1) * 4 + 2 * 2 * 4 * 512 * 64 * 2
    assert workspace(torch.ops.aten.mm.default, (query, query)) == 0
