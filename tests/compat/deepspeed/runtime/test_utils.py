"""``PartitionedTensor`` on three processes: parts, ``full``, ``to_meta`` (as of DeepSpeed 0.19.8), ``from_meta``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import PartitionedTensor

from tests.helpers.distributed import run_distributed


def _divide() -> list[dict[str, Any]]:
    found = []
    for size in ((3, 5), (2, 5), (1,)):
        whole = torch.arange(float(torch.Size(size).numel()), dtype=torch.float64).view(size)
        part = PartitionedTensor(whole, dist.group.WORLD)
        again = PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.group.WORLD)
        assert torch.equal(part.full(), whole)
        assert torch.equal(again.full(device="cpu"), whole)
        assert repr(part).startswith(f"PartitionedTensor({list(size)}, part {dist.get_rank()} of 3: ")
        assert (again.even_split, part.full_size(), part.local_size()) == (
            part.even_split,
            list(size),
            part.data().shape,
        )
        found.append({"data": part.data().tolist(), "meta": part.to_meta().tolist(), "even": part.even_split})
    meta = part.to_meta()
    with pytest.raises(ValueError, match=r"local_part has 4 elements, and the part that meta describes"):
        PartitionedTensor.from_meta(meta, torch.zeros(4), dist.group.WORLD)
    with pytest.raises(ValueError, match=r"not what to_meta\(\) gives"):
        PartitionedTensor.from_meta(meta[:-1], part.data(), dist.group.WORLD)
    with pytest.raises(ValueError, match=r"part . of 3 is not that of process 0 of the 1 in this group"):
        PartitionedTensor.from_meta(meta, part.data(), [dist.new_group([rank]) for rank in range(3)][dist.get_rank()])
    return found


def test_parts_are_as_long_and_described_as_deepspeeds() -> None:
    ranks = run_distributed(_divide, 3, timeout=20)
    assert [rank[0]["data"] for rank in ranks] == [[float(i) for i in range(k, k + 5)] for k in (0, 5, 10)]
    assert [rank[1]["data"] for rank in ranks] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [rank[2]["data"] for rank in ranks] == [[0], [], []]
    assert ranks[1][1]["meta"] == [2, 2, 5, 3, 1, 0, 4, 7, 10]  # dimensions, sizes, parts, rank, bounds
    assert [each["even"] for each in ranks[0]] == [True, False, False]
