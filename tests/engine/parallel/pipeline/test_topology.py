"""Coordinates, checked against numbers written by hand, and groups of a grid on four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid
from ds_hf.engine.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    prime_factors,
)
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed


def test_ranks_are_row_major() -> None:
    topology = ProcessTopology(axes=["a", "b", "c"], dims=[2, 3, 4])
    assert topology.world_size() == 24
    assert [topology.get_rank(a=1, b=2, c=c) for c in range(4)] == [20, 21, 22, 23]
    assert topology.get_coord(13) == topology.ProcessCoord(1, 0, 1)
    assert [topology.get_dim(axis) for axis in ("a", "b", "c", "none")] == [2, 3, 4, 0]
    assert topology.get_axis_list("c", 3) == [3, 7, 11, 15, 19, 23]
    assert topology.filter_match(a=0, b=1) == [4, 5, 6, 7]


def test_model_parallel_processes_are_neighbours() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("expert") == []
    assert [topology.get_rank_repr(rank) for rank in (0, 7)] == ["model_00", "model_01"]
    assert topology.get_rank_repr(5, omit_axes=[], inner_sep="=", outer_sep="/") == "pipe=01/data=00/model=01"


def test_bad_coordinates_are_errors() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    with pytest.raises(ValueError, match="each axis"):
        topology.get_rank(pipe=1)
    with pytest.raises(ValueError, match="no rank"):
        topology.get_rank(pipe=1, data=3)
    with pytest.raises(ValueError, match="rank 6"):
        topology.get_coord(6)
    with pytest.raises(ValueError, match="at least 1"):
        ProcessTopology(["pipe"], [0])


def test_prime_factors() -> None:
    assert prime_factors(360) == [2, 2, 2, 3, 3, 5]
    assert prime_factors(1) == []
    with pytest.raises(ValueError, match="positive"):
        prime_factors(0)


def grids() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, topology in (
        ("pipe first", PipeDataParallelTopology(2, 2)),
        ("data first", ProcessTopology(["data", "pipe"], [2, 2])),
        ("model", PipeModelDataParallelTopology(2, 2, 1)),
        ("default", None),
    ):
        grid = PipelineParallelGrid(topology)
        sums = []
        for group in (grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group()):
            value = torch.tensor([rank])
            dist.all_reduce(value, group=group)
            sums.append(int(value))
        found[name] = {
            "sums": sums,
            "pp": grid.pp_group,
            "dp": grid.dp_group,
            "stage": grid.get_stage_id(),
            "ends": (grid.is_first_stage, grid.is_last_stage),
            "other": grid.stage_to_global(1 - grid.stage_id),
            "sizes": (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()),
            "slice": (grid.get_slice_parallel_rank(), grid.get_tensor_model_parallel_world_size()),
            "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
            "p2p": grid.p2p_groups,
        }
    try:
        PipelineParallelGrid(PipeDataParallelTopology(3, 1))
    except ConfigError as error:
        found["error"] = str(error)
    return found


def test_groups_of_a_grid() -> None:
    ranks = run_distributed(grids, 4)
    for rank, found in enumerate(ranks):
        assert "pipe 3 x data 1 are 3 processes, and there are 4" in found["error"]
        one = found["pipe first"]
        assert (one["pp"], one["dp"]) == ([rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1])
        assert one["sums"] == [sum(one["pp"]), sum(one["dp"]), sum(one["pp"])]
        assert (one["stage"], one["ends"]) == (rank // 2, (rank < 2, rank >= 2))
        assert one["other"] == (rank + 2) % 4
        assert one["model"] == (rank // 2, 2)
        assert one["p2p"] == [[0, 2], [1, 3], [2, 0], [3, 1]]
        other = found["data first"]
        assert (other["pp"], other["dp"]) == ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])
        assert other["sums"] == [sum(other["pp"]), sum(other["dp"]), sum(other["pp"])]
        assert other["stage"] == rank % 2
        three = found["model"]
        assert (three["slice"], three["sizes"], three["model"]) == ((rank % 2, 2), (2, 1), (rank, 4))
        assert three["sums"] == [rank % 2 * 2 + 2, rank, 6]
        assert found["default"]["sizes"] == (2, 2)
