"""Items grouped by where they go: kernels, run thread by thread on the host, and torch's operators, against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.ops import cuda_build, cuda_launch, routes
from tests.helpers import cubin
from tests.helpers.cuda_emulator import emulate

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=["torch", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        emulate(request.getfixturevalue("tmp_path_factory"), monkeypatch)
        monkeypatch.setattr(routes, "TUNING", cuda_launch.Tuning(threads=64, blocks=1))
        monkeypatch.setattr(routes, "_by_kernel", routes._fits)
        monkeypatch.setattr(routes, "_by_copies", lambda values, count: count > 0)
    return str(request.param)


def check(found: routes.Groups, keys: list[list[int]], groups: int) -> None:
    """``keys`` by place: the group of each item, -1 for none."""
    each, flat = len(keys[0]), [key for place in keys for key in place]
    wanted = sorted((item for item in range(len(flat)) if flat[item] >= 0), key=lambda item: (flat[item], item))
    there = found.first(len(wanted))
    assert there.order.tolist() == wanted
    assert there.place.tolist() == [item // each for item in wanted]
    assert there.group.tolist() == [flat[item] for item in wanted]
    at = {item: number for number, item in enumerate(wanted)}
    assert there.number.tolist() == [at.get(item, -1) for item in range(len(flat))]
    assert there.by_place.tolist() == [at[item] for item in sorted(wanted)]
    starts = [sum(key >= 0 for key in flat[: place * each]) for place in range(len(keys))]
    assert there.starts.tolist() == starts


@pytest.mark.parametrize(
    ("dtype", "places", "each", "groups"),
    [
        (torch.int64, 5, 2, 3),
        (torch.int64, 150, 4, 7),
        (torch.int32, 90, 8, 100),
        (torch.int16, 64, 3, 33),
        (torch.int16, 1, 1, 1),
    ],
)
def test_items_are_in_the_order_of_their_groups(
    way: str, dtype: torch.dtype, places: int, each: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(places)
    wide = torch.randint(-1, groups + 2, (places, 2 * each), generator=generator).to(dtype)
    keys = wide[:, :each]  # rows lie apart
    found = routes.group(keys, groups)
    flat = [[key if 0 <= key < groups else -1 for key in place] for place in keys.tolist()]
    check(found, flat, groups)
    counts = torch.bincount(torch.tensor([key for place in flat for key in place if key >= 0]), minlength=groups)
    assert found.totals.tolist() == counts.tolist()
    assert found.ends.tolist() == counts.cumsum(0).tolist()
    assert found.ends.dtype is torch.int32


def places_of(size: int, rank: int) -> list[int]:
    return [*(each for each in range(size) if each != rank), rank]


def chosen(tokens: int, k: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, number + 1, generator=generator).argsort(1)[:, :k].contiguous()  # the last number: none


@pytest.mark.parametrize(("tokens", "size", "rank", "k"), [(7, 3, 1, 2), (1, 2, 1, 1), (140, 4, 0, 3), (40, 8, 7, 8)])
def test_tokens_go_once_to_each_process_that_has_experts_of_theirs(
    way: str, tokens: int, size: int, rank: int, k: int
) -> None:
    count = 2
    experts = chosen(tokens, k, size * count)
    found = routes.group_by_process(experts, count, rank, size)
    owners = [[expert // count for expert in token] for token in experts.tolist()]
    order = places_of(size, rank)
    check(found, [[d if order[d] in owner else -1 for d in range(size)] for owner in owners], size)
    assert found.totals.tolist() == [
        [sum(p in owner for owner in owners), sum(owner.count(p) for owner in owners)] for p in range(size)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 2])
def test_labels_and_their_gradient(way: str, dtype: torch.dtype, rank: int) -> None:
    size, count, k = 3, 2, 2
    experts = chosen(9, k, size * count)
    rows = routes.group_by_process(experts, count, rank, size)
    rows = rows.first(int(rows.totals[:, 0].sum()))
    values = torch.rand(9, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    way_of = count, rank, size
    found = routes.label(values, experts, rows.order, *way_of)
    grad = torch.rand(found.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted_grad = torch.zeros_like(values)
    numbers = found[:, :k].contiguous().view(routes.BITS[dtype.itemsize]).tolist()
    for row, item in enumerate(rows.order.tolist()):
        token, process = item // size, places_of(size, rank)[item % size]
        for j, expert in enumerate(experts[token].tolist()):
            here = expert // count == process
            assert numbers[row][j] == (expert % count if here else count)
            assert found[row, k + j] == (values[token, j] if here else 0)
            if here:
                wanted_grad[token, j] = grad[row, k + j]
    assert torch.equal(routes.unlabel(grad, experts, rows.number, *way_of), wanted_grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "width"), [(0, 3), (3, 6), (1, 5)])
def test_what_belongs_to_items_is_picked(way: str, dtype: torch.dtype, offset: int, width: int) -> None:
    keys = torch.tensor([[2, 0, 9], [1, 9, 1], [9, 9, 9], [0, 2, 1]])
    items = routes.group(keys, 3)
    items = items.first(int(items.totals.sum()))
    values = torch.rand(4, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = routes.pick(values, items.order, 3, offset)
    assert torch.equal(found, torch.stack([values[item // 3, offset + item % 3] for item in items.order.tolist()]))
    wanted = torch.zeros_like(values)
    for number, item in enumerate(items.order.tolist()):
        wanted[item // 3, offset + item % 3] = found[number]
    assert torch.equal(routes.unpick(found, items.number, 3, offset, width), wanted)


def test_nothing_to_group(way: str) -> None:
    assert routes.group(torch.zeros(0, 2, dtype=torch.int64), 3).totals.tolist() == [0, 0, 0]
    none = routes.group(torch.full((2, 2), 7), 3).first(0)
    assert none.starts.tolist() == [0, 0]
    assert none.number.tolist() == [-1] * 4
    assert routes.group_by_process(torch.zeros(0, 2, dtype=torch.int64), 2, 0, 2).totals.tolist() == [[0, 0]] * 2


@pytest.mark.skipif(cubin.compiler() is None, reason="neither NVRTC nor nvcc is here")
@pytest.mark.parametrize(("key", "bins", "owners"), [(2, 1024, 0), (8, 32, 1)])
def test_cuda_compiles_and_spills_nothing(key: int, bins: int, owners: int) -> None:
    macros: Any = (*routes.TUNING.macros, ("DS_KEY", key), ("DS_BINS", bins), ("DS_OWNERS", owners))
    frames = cubin.frame_nbytes(cubin.compiled(cuda_build.program_text("routes.cu", macros), "sm_90"))
    assert len(frames) >= 6
    assert max(frames.values()) <= 8, frames
