"""Axes of a mesh: which ranks they have, what is made for them, and what comes from an ``mpu``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ds_hf.config.types.root import AXES, MeshShape
from ds_hf.engine.comm.collectives import all_reduce_sum
from ds_hf.engine.comm.memory import PeerOutOfMemory, shared_out_of_memory
from ds_hf.engine.comm.mesh import Axis, Mesh, host_group
from ds_hf.engine.zero.cut import even_cut, set_cut
from ds_hf.engine.zero.replicas import replicas_of
from ds_hf.errors import ConfigError
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


def waits_of(group: Any) -> float:
    """Seconds that a collective of the group may take."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


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
        "waits": [waits_of(dist.group.WORLD), waits_of(hierarchical.axis("inner").group)],
        "sample": (plain.sample_rank, cut.sample_rank, Mesh(MeshShape(data=2, sequence=2)).sample_rank),
    }


def test_axes_of_four_processes() -> None:
    for rank, found in enumerate(run_distributed(axes_of_four, 4)):
        assert found["waits"][0] == found["waits"][1] != dist.default_pg_timeout.total_seconds()
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


def hosts_of_an_mpu() -> dict[str, Any]:
    """Neighbours on the data-parallel axis of an ``mpu`` whose model-parallel ranks are consecutive."""
    mpu, alone, one = Mpu(2), Mpu(1), MeshShape(data=4, inner=2)
    mesh, pairs = Mesh.given(mpu, MeshShape(data=2, tensor=2, inner=1)), Mesh.given(alone, one)
    with pytest.raises(ConfigError, match="the data-parallel group of the mpu is 2 of 4 processes"):
        Mesh.given(mpu, MeshShape(data=2, inner=1))
    part = nn.Parameter(torch.zeros(2))
    row = replicas_of(part, pairs)
    assert row.inner is not None
    return {
        "single": [ranks_of(mesh.axis("inner")), ranks_of(mesh.axis("outer"))],
        "pairs": [ranks_of(pairs.axis("inner")), ranks_of(pairs.axis("outer"))],
        "over": [ranks_of(row.over("inner")), ranks_of(row.over("replicas"))],
        "others": (row.others(row.inner) == pairs.outer, row.others(row.axis)),
        "owners": [row.owners(whole=False, shards=axis) for axis in (row.inner, row.axis)],
    }


def test_neighbours_among_the_replicas_of_an_mpu() -> None:
    for rank, found in enumerate(run_distributed(hosts_of_an_mpu, 4)):
        pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert found["single"] == [[rank], across]
        assert found["pairs"] == [pair, across]
        assert found["over"] == [pair, [0, 1, 2, 3]]
        assert found["others"] == (True, None)
        assert found["owners"] == [2, 1]


# -- what holds for every mesh ----------------------------------------------------------------------------------------


def meshes_of_four() -> dict[str, Mesh]:
    """One of each kind, over the same four processes."""
    return {
        "data": Mesh(MeshShape(data=4)),
        "data, tensor": Mesh(MeshShape(data=2, tensor=2)),
        "data, sequence": Mesh(MeshShape(data=2, sequence=2)),
        "pipe, data": Mesh(MeshShape(pipe=2, data=2)),
        "neighbours": Mesh(MeshShape(data=4, inner=2)),
        "an mpu's": Mesh.given(Mpu(2), MeshShape(data=2, tensor=2)),
        "an mpu's data": Mesh.given(Mpu(1), MeshShape(data=4)),
        "an mpu's neighbours": Mesh.given(Mpu(1), MeshShape(data=4, inner=2)),
    }


def axes_hold() -> int:
    """Check every axis of every mesh; how many there were."""
    checked = 0
    for name, mesh in meshes_of_four().items():
        wanted = [("data",), ("tensor",), ("data", "sequence")]
        wanted += [("inner",), ("outer",)] if mesh.shape.inner else []
        for dims in wanted:
            axis = mesh.axis(*dims)
            ranks, here = ranks_of(axis), dist.get_rank()
            assert mesh.axis(*dims) is axis, (name, dims)
            assert ranks == sorted(set(ranks)), (name, dims)
            assert ranks[axis.rank] == here, (name, dims)
            assert [axis.axis_rank(rank) for rank in ranks] == list(range(axis.world_size)), (name, dims)
            assert set(ranks) <= set(ranks_of(mesh.world)), (name, dims)
            every: list[Any] = [None] * 4
            dist.all_gather_object(every, ranks)
            assert all(every[rank] == ranks for rank in ranks), (name, dims, "all of it see the same")
            assert len({tuple(other) for other in every}) * axis.world_size == 4, (
                name,
                dims,
                "they divide the world",
            )
            seen = torch.zeros(4)
            seen[here] = 1
            all_reduce_sum(seen, axis)
            assert seen.nonzero().flatten().tolist() == ranks, (name, dims, "what is summed over")
            checked += 1
        assert mesh.replicas is mesh.axis("data", "sequence"), name
        sizes = (mesh.shape.data * mesh.shape.sequence, mesh.world.world_size)
        assert (mesh.replicas.world_size, 4) == sizes, name
        assert 0 <= mesh.sample_rank < mesh.shape.data, name
        if mesh.inner is not None and mesh.outer is not None:
            assert mesh.inner.world_size * mesh.outer.world_size == mesh.replicas.world_size, name
            assert set(ranks_of(mesh.inner)) & set(ranks_of(mesh.outer)) == {dist.get_rank()}, name
    return checked


def test_what_holds_for_every_mesh() -> None:
    assert run_distributed(axes_hold, 4, timeout=60) == [28] * 4


def reduced_on_the_host() -> list[Any]:
    """Where some processes have made a group more than others, as under accelerate where layers are shared."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = Mesh(MeshShape(data=2, tensor=2))
    found: list[Any] = []
    for axis in (mesh.world, mesh.world, mesh.replicas, mesh.axis("tensor")):
        value = torch.tensor([dist.get_rank()])
        dist.all_reduce(value, group=host_group(axis))
        found.append(int(value))
    try:
        with shared_out_of_memory(mesh, lambda error: isinstance(error, MemoryError)):
            if dist.get_rank() == 3:
                raise MemoryError
            all_reduce_sum(torch.zeros(1), mesh.axis("tensor"))
    except (MemoryError, PeerOutOfMemory) as error:
        found.append(type(error).__name__)
    return found


def test_groups_of_processes_that_have_made_others() -> None:
    found = run_distributed(reduced_on_the_host, 4, timeout=60)
    sums = [(6, 6, 2, 1), (6, 6, 4, 1), (6, 6, 2, 5), (6, 6, 4, 5)]
    raised = [*["PeerOutOfMemory"] * 3, "MemoryError"]
    assert found == [[*each, name] for each, name in zip(sums, raised, strict=True)]


def test_groups_of_sequences_alone_have_no_room_for_shared_layers() -> None:
    """What the Trainer and accelerate give the engine for ``sp_size``, beside ``tensor_parallel`` of the file."""

    class Sequences:
        get_sequence_parallel_group = get_sequence_parallel_world_size = staticmethod(lambda: 2)

    with pytest.raises(ConfigError, match=r"sp_size of accelerate's ParallelismConfig.* leave out one of the two"):
        Mesh.given(Sequences(), MeshShape(sequence=2, tensor=2))
