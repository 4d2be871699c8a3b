"""Items grouped on a GPU at the sizes of a training, against torch's operators."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.ops import routes

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
    rows = routes.group_by_process(experts, count, rank, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_by_kernel", lambda *_: False)
        patch.setattr(routes, "_by_copies", lambda *_: False)
        wanted = routes.group_by_process(experts, count, rank, size)
        there = same(rows, wanted)
        assert torch.equal(rows.totals, wanted.totals)
        rows = rows.first(there)
        values = torch.rand(tokens, k, device="cuda", generator=generator).bfloat16()
        way = count, rank, size
        labels = routes.label(values, experts, rows.order, *way)
        back = routes.unlabel(labels, experts, rows.number, *way)
    assert torch.equal(routes.label(values, experts, rows.order, *way), labels)
    assert torch.equal(routes.unlabel(labels, experts, rows.number, *way), back)
    bits = labels.view(torch.int16)[:, :k]
    same(routes.group(bits, count), routes._grouped(bits, count))
