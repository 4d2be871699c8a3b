"""Items grouped, and rows times numbers, on a GPU at the sizes of a training, against torch's operators."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.ops import routes, rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def same(found: routes.Groups, wanted: routes.Groups) -> int:
    count = int(wanted.totals.reshape(len(wanted.totals), -1)[:, 0].sum())
    for name, one, other in zip(found._fields, found.first(count), wanted.first(count), strict=True):
        assert name == "ends" or torch.equal(one, other), name
    return count


@pytest.mark.parametrize(("tokens", "k", "number"), [(4096, 8, 128), (32768, 8, 64), (1, 4, 32), (20000, 6, 1000)])
def test_groups(tokens: int, k: int, number: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    experts = torch.rand(tokens, number + 1, device="cuda", generator=generator).argsort(1)[:, :k].contiguous()
    found = routes.group(experts, number)
    same(found, routes._grouped(experts, number))
    assert torch.equal(found.ends, found.totals.cumsum(0).int())
    size, rank = 4, 2
    count = number // size
    tokens_of = routes.group_by_process(experts, count, rank, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_by_kernel", lambda *_: False)
        patch.setattr(routes, "_by_copies", lambda *_: False)
        wanted = routes.group_by_process(experts, count, rank, size)
        there = same(tokens_of, wanted)
        assert torch.equal(tokens_of.totals, wanted.totals)
        tokens_of = tokens_of.first(there)
        values = torch.rand(tokens, k, device="cuda", generator=generator).bfloat16()
        way = count, rank, size
        labels = routes.label(values, experts, tokens_of.order, *way)
        back = routes.unlabel(labels, experts, tokens_of.number, *way)
    assert torch.equal(routes.label(values, experts, tokens_of.order, *way), labels)
    assert torch.equal(routes.unlabel(labels, experts, tokens_of.number, *way), back)
    bits = labels.view(torch.int16)[:, :k]
    same(routes.group(bits, count), routes._grouped(bits, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "width"), [(32768, 2048), (5, 2880), (70000, 100)])
def test_rows_times_numbers(count: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    x, grad = (torch.randn(count, width, device="cuda", generator=generator).to(dtype) for _ in range(2))
    sums = (x.double() * grad.double()).sum(1, keepdim=True)
    for of_scale in {dtype, torch.float32}:
        scale = torch.rand(count, 1, device="cuda", generator=generator).to(of_scale)
        assert torch.equal(rows.weigh(x, scale), (x * scale).to(dtype))
        of_x, of_numbers = rows.weigh_backward(grad, x, scale)
        assert torch.equal(of_x, (grad * scale).to(dtype))
        close = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}[of_scale]
        torch.testing.assert_close(of_numbers.double(), sums, rtol=close, atol=close * width**0.5)
