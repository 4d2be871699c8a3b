"""The processes of a topology, with groups along its axes: DeepSpeed's ``PipelineParallelGrid``, an ``mpu`` too.

The groups are those of a ``Mesh``, which the engine takes over: none is made twice.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_hf.config.mesh import given_claims, require_features
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.parallel.pipeline.topology import PipeDataParallelTopology, ProcessTopology, prime_factors
from ds_hf.errors import ConfigError

__all__ = ["PipelineParallelGrid"]

_AXES = {"pipe": "pipe", "data": "data", "model": "tensor"}


class PipelineParallelGrid:
    """Where this process is in a topology of axes pipe, data and model. All processes make it.

    Args:
        topology: default pipe x data, of sizes as near to each other as the prime factors allow.
        process_group: accepted for DeepSpeed's sake; the topology is of all processes.

    Attributes:
        mesh: the same processes, as the engine sees them.
        stage_id, data_parallel_id: coordinates of this process.
        is_first_stage, is_last_stage: whether it is in that one.
        pp_group, dp_group, slice_group: global ranks of those that differ from it along pipe, data and model alone.
        p2p_groups: each rank with the same place in the next stage; the first one comes after the last.

    Raises:
        ConfigError: the topology has not as many processes as there are, or other axes.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: dist.ProcessGroup | None = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = _near_square(self.world_size) if topology is None else topology
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        require_features(given_claims(topology=self._topo))
        if not self._is_grid_valid():
            sizes = " x ".join(f"{axis} {self._topo.get_dim(axis)}" for axis in self._topo.get_axis_names())
            raise ConfigError(
                f"{sizes} are {self._topo.world_size()} processes, and there are {self.world_size}", "topology"
            )
        shape = MeshShape(pipe=self.pipe_parallel_size, data=self.data_parallel_size, tensor=self.model_parallel_size)
        order = [_AXES[axis] for axis in self._topo.get_axis_names() if axis in _AXES]
        self.mesh = Mesh(shape, order=order, layers_given=self.model_parallel_size > 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.p2p_groups = self._p2p_groups()
        # All of them now, in one order on all processes: functions that return a group may be called by one alone.
        model = self.mesh.axis("pipe", "tensor")
        self.ds_model_proc_group, self.ds_model_rank, self.ds_model_world_size = _parts(model)
        self.dp_proc_group, self.pp_proc_group, self.slice_proc_group = (
            _parts(self.mesh.axis(axis))[0] for axis in ("data", "pipe", "tensor")
        )
        self.dp_groups = self._lists("data")
        self.pipe_groups = self._lists("pipe")
        self.model_groups = self._lists("model")
        self.dp_group, self.pp_group, self.slice_group = (
            next(ranks for ranks in lists if self.global_rank in ranks)
            for lists in (self.dp_groups, self.pipe_groups, self.model_groups)
        )

    def _lists(self, axis: str) -> list[list[int]]:
        """Groups along ``axis``; each process alone where there is no such axis."""
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _p2p_groups(self) -> list[list[int]]:
        following = {
            rank: ranks[(place + 1) % len(ranks)] for ranks in self._lists("pipe") for place, rank in enumerate(ranks)
        }
        return [[rank, following[rank]] for rank in range(self.world_size)]

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == dist.get_world_size()

    def _coordinate(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Global rank of the process at this one's place in stage ``stage_id``; ``kwargs`` change other coordinates."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def get_stage_id(self) -> int:
        return self._coordinate("pipe")

    def get_data_parallel_id(self) -> int:
        return self._coordinate("data")

    def get_global_rank(self) -> int:
        return self.global_rank

    # -- the pipeline ---------------------------------------------------------------------------------------------

    def get_pipe_parallel_rank(self) -> int:
        """The stage of this process."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Processes of one pipeline, one in each stage."""
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    # -- data -----------------------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        """The pipeline of this process."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Number of pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Processes that hold the same layers."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return self.dp_group

    # -- the model, pipe x tensor ---------------------------------------------------------------------------------

    def get_model_parallel_rank(self) -> int:
        """Place of this process among those that hold one model together: pipe x model."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """How many processes hold one model together."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Processes that hold one model together."""
        return self.ds_model_proc_group

    # -- tensor ---------------------------------------------------------------------------------------------------

    def get_slice_parallel_rank(self) -> int:
        """Place of this process among those that share its layers."""
        return self._coordinate("model")

    def get_slice_parallel_world_size(self) -> int:
        """How many processes share a layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Processes that share layers."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def _near_square(processes: int) -> PipeDataParallelTopology:
    """Prime factors are given to pipe and data in turn, as in DeepSpeed."""
    pipe = data = 1
    for place, factor in enumerate(prime_factors(processes)):
        pipe, data = (pipe * factor, data) if place % 2 == 0 else (pipe, data * factor)
    return PipeDataParallelTopology(num_pp=pipe, num_dp=data)


def _parts(axis: Axis) -> tuple[Any, int, int]:
    """Group, place and size."""
    return dist.group.WORLD if axis.group is None else axis.group, axis.rank, axis.world_size
