"""Axes of a mesh: which ranks they have, what is made for them, and what comes from an ``mpu``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ds_hf.config.types.mesh import AXES, MeshShape
from ds_hf.engine.dist.mesh import Axis, Mesh
from ds_hf.engine.zero.cut import even_cut, set_cut
from ds_hf.engine.zero.replicas import replicas_of
from tests.helpers.distributed import run_distributed
from tests.helpers.megatron import Mpu


def ranks_of(axis: Axis) -> list[int]:
    return [axis.global_rank(rank) for rank in range(axis.world_size)]


def axes_of_sixteen(rank: int) -> list[str]:
    """Where ds_hf and torch's DeviceMesh disagree, on one rank of a process group that communicates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
    theirs = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=AXES)
    mesh = Mesh(MeshShape(pipe=2, data=2, sequence=2, tensor=2))
    wrong = []
    for length in (1, 2, 3):
        for dims in itertools.combinations(AXES, length):
            expected = theirs[dims]._flatten("_".join(dims)) if length > 1 else theirs[dims]
            axis = mesh.axis(*dims)
            if ranks_of(axis) != dist.get_process_group_ranks(expected.get_group()):
                wrong.append(f"{dims}: {ranks_of(axis)}")
            if mesh.axis(*reversed(dims)) is not axis or axis.global_rank(axis.rank) != rank:
                wrong.append(f"{dims}: not one axis, or another place on it")
    if mesh.axis(*AXES) != mesh.world or mesh.replicas is not mesh.axis("data", "sequence"):
        wrong.append("not the world")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_axes_are_those_of_a_device_mesh(rank: int) -> None:
    assert run_distributed(axes_of_sixteen, 1, rank, backend=None) == [[]]


def axes_of_four() -> dict[str, Any]:
    plain, cut = Mesh(MeshShape(data=4)), Mesh(MeshShape(data=2, tensor=2))
    hierarchical = Mesh(MeshShape(data=4, inner=2))
    whole, part = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    set_cut(part, even_cut([2], 0, cut.axis("tensor").rank, 2))
    rows = [replicas_of(param, mesh) for param, mesh in ((whole, plain), (whole, cut), (part, cut))]
    return {
        "plain": [plain.axis(dim).group is None for dim in ("data",)] + [plain.replicas == plain.world],
        "alone": ranks_of(plain.axis("tensor")),
        "inner": ranks_of(hierarchical.axis("inner")),
        "outer": ranks_of(hierarchical.axis("outer")),
        "rows": [(ranks_of(row.axis), row.divisor, row.copies, row.owners(whole=True)) for row in rows],
        "sample": (plain.sample_rank, cut.sample_rank, Mesh(MeshShape(data=2, sequence=2)).sample_rank),
    }


def test_axes_of_four_processes() -> None:
    for rank, found in enumerate(run_distributed(axes_of_four, 4)):
        assert found["plain"] == [True, True]  # torch's own group: no other is made
        assert found["alone"] == [rank]
        assert found["inner"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["outer"] == [rank % 2, rank % 2 + 2]
        everybody, part = [0, 1, 2, 3], [rank % 2, rank % 2 + 2]
        assert found["rows"] == [(everybody, 4, 1, 4), (everybody, 4, 1, 4), (part, 2, 1, 2)]
        assert found["sample"] == (rank, rank // 2, rank // 2)


def given_axes() -> dict[str, Any]:
    mpu = Mpu(2)
    mesh = Mesh.given(mpu, MeshShape(data=2, tensor=2))
    whole, part = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    part.model_parallel = True  # type: ignore[attr-defined]
    rows = [replicas_of(param, mesh) for param in (whole, part)]
    half = Mesh.given(mpu, MeshShape(data=2))  # its model-parallel sizes are 1: the other processes do something else
    with pytest.raises(ValueError, match="has made no group of processes along data x tensor"):
        mesh.axis("data", "tensor")
    return {
        "axes": [ranks_of(axis) for axis in (mesh.replicas, mesh.axis("data"), mesh.axis("tensor"), mesh.world)],
        "half": [ranks_of(half.world), ranks_of(half.replicas)],
        "rows": [(ranks_of(row.axis), row.divisor, row.copies, row.owners(whole=False)) for row in rows],
        "sample": mesh.sample_rank,
    }


def test_groups_of_an_mpu() -> None:
    for rank, found in enumerate(run_distributed(given_axes, 4)):
        data, tensor = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["axes"] == [data, data, tensor, [0, 1, 2, 3]]
        assert found["half"] == [data, data]
        assert found["rows"] == [(data, 2, 2, 2), (data, 2, 1, 1)]  # nothing is averaged over the mpu's model group
        assert found["sample"] == rank // 2
