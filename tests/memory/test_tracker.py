"""Live bytes on the meta device, and the kernels that a GPU would run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_multiply_in_any_dtype(dtype: torch.dtype) -> None:
    """Products of 6 rows with 2 experts, and gradients of both; on the meta device torch knows bf16 alone."""
    rows, weights = meta(6, 16, dtype=dtype, grad=True), meta(2, 16, 8, dtype=dtype, grad=True)
    with LiveTensors(lambda live, scratch: None):
        product = F.grouped_mm(rows, weights, offs=torch.zeros(2, dtype=torch.int32, device="meta"))
        product.backward(meta(6, 8, dtype=dtype))
    for found, shape in ((product, (6, 8)), (rows.grad, (6, 16)), (weights.grad, (2, 16, 8))):
        assert found is not None
        assert (tuple(found.shape), found.dtype) == (shape, dtype)


def test_rows_of_grouped_products_are_aligned_in_bytes() -> None:
    """Biases of experts are summed by a product with four columns of ones in fp32: 16 bytes, but 8 in bf16."""
    ones, rows = meta(6, 4), meta(6, 16)
    with LiveTensors(lambda live, scratch: None):
        sums = F.grouped_mm(ones.mT, rows, offs=torch.zeros(2, dtype=torch.int32, device="meta"))
    assert (tuple(sums.shape), sums.dtype) == ((2, 4, 16), torch.float32)


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


def test_results_are_remembered_by_all_that_they_depend_on() -> None:
    """Shapes, strides, dtypes, plain arguments, several results, operators that write or that return an argument."""
    leaf, half = meta(4, 6), meta(6, 4, dtype=torch.bfloat16)
    calls = [
        lambda: leaf + 1, lambda: leaf + 1.0, lambda: half + 1, lambda: half + 1.0, lambda: half.t() + 1,
        lambda: (half.t() > 1, half.t() + leaf), lambda: half.bool() * 2, lambda: half.bool() * True,
        lambda: half.long() * 2.0, lambda: leaf.t() @ leaf, lambda: leaf[:2] @ leaf.t(), lambda: leaf.sum(0),
        lambda: leaf.sum(1), lambda: leaf.sum(1, keepdim=True), lambda: torch.cat([leaf, leaf[:1]]),
        lambda: torch.cat([leaf, leaf[:1], leaf]), lambda: leaf.max(dim=1), lambda: leaf.max(), lambda: leaf.sort(),
        lambda: leaf.split(2), lambda: leaf.clone().add_(1), lambda: leaf.float(), lambda: leaf.half(),
        lambda: F.layer_norm(leaf, (6,)), lambda: torch.native_layer_norm(half.t(), (6,), None, None, 1e-5),
        lambda: torch.empty_like(half.t()), lambda: torch.zeros(3, 5, device="meta"),
        lambda: torch.zeros(3, device="meta"), lambda: torch.zeros(3), lambda: torch.arange(4)[1:].sum(),
        lambda: leaf.expand(3, 4, 6).clone(),
        lambda: F.dropout(leaf, 0.5, training=False), lambda: leaf.view(3, 8) * 2,
        lambda: leaf.clone().t_(), lambda: leaf.clone().resize_(2, 2), lambda: leaf.clone().unsqueeze_(0).mul_(2),
        lambda: half.t().clone().addmm_(half.t(), half @ half.t()), lambda: leaf.clone().set_(half.float()),
    ]  # fmt: skip

    def all_of() -> list[object]:
        given = {leaf.untyped_storage()._cdata: "leaf", half.untyped_storage()._cdata: "half"}
        seen = []
        for call in calls:
            tensors = call()  # type: ignore[no-untyped-call]
            for each in (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors):
                storage = each.untyped_storage()
                seen.append((*map(str, (each.shape, each.stride(), each.dtype, each.device)), storage.nbytes()))
                seen[-1] += (given.get(storage._cdata, "its own"), each.tolist() if each.device.type == "cpu" else None)
        return seen

    expected = all_of()
    for context in (torch.enable_grad(), torch.inference_mode()):
        with context, LiveTensors(lambda live, scratch: None) as tracker:
            assert all_of() == all_of() == expected
            assert len(tracker._results._found) > 20


def test_what_is_remembered_is_not_called_again() -> None:
    """Five layers ask what one asks; operators that change a form are asked each time."""
    counted: list[object] = []

    class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.append(func)
            return func(*args, **(kwargs or {}))

    leaf, weight = meta(4, 4), meta(4, 4)
    with Counts(), LiveTensors(lambda live, scratch: None):  # the inner mode's calls reach the outer one
        for _ in range(5):
            leaf = (leaf @ weight).sigmoid()
            leaf.addmm_(leaf, weight).t_()
    aten = torch.ops.aten
    asked = [aten.mm.default, aten.sigmoid.default, aten.addmm_.default, aten.t_.default]
    assert [counted.count(func) for func in asked] == [2, 1, 1, 5], "the first product's strides are others"


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


def test_a_storage_that_grows_counts_as_large_as_it_is() -> None:
    """``resize_`` and the ``out`` of an operator begin with nothing."""
    given = meta(256)
    with LiveTensors(lambda live, scratch: None) as tracker:
        tracker.ignore(given)
        grown = [meta(0).resize_(1000), torch.mul(given, 2, out=meta(0)), torch.cat([given] * 4, out=meta(0))]
        assert sum(tracker.live) == sum(rounded(each) for each in (4000, 1024, 4096))
        grown.clear()
        given.mul_(2)
        assert sum(tracker.live) == 0


def test_a_sparse_gradient_counts_its_rows() -> None:
    """6 rows of 64 numbers, and where they belong; the table has 1024 of them."""
    table = meta(1024, 64, grad=True)
    tracker = LiveTensors(lambda live, scratch: None)
    tracker.ignore(table)
    with tracker:
        F.embedding(meta(2, 3, dtype=torch.long), table, sparse=True).sum().backward()
        assert table.grad is not None
        tracker.relabel(table.grad, Kind.GRADIENTS)
    assert tracker.live[Kind.GRADIENTS] == 6 * 64 * 4 + 512


def test_operators_of_ones_own_and_the_default_dtype_are_asked_again() -> None:
    calls: list[object] = []

    @torch.library.custom_op("ds_hf_tests::counts_calls", mutates_args=())
    def counts_calls(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @counts_calls.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.new_empty(len(calls))

    whole = meta(4, dtype=torch.long)
    with LiveTensors(lambda live, scratch: None):
        assert [len(counts_calls(whole)) for _ in range(2)] == [1, 2]
        found = [(whole / 2).dtype]
        torch.set_default_dtype(torch.float64)
        try:
            found.append((whole / 2).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]
