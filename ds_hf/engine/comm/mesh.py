"""The process mesh and its axes.

Invariants
- An ``Axis`` is only made once the process group exists; its ``rank`` counts along the axis, not globally.
- A ``Mesh`` makes the groups of its axes itself, or has all of them from an ``mpu``.
- Each process group has one log for all engines on it, which lives as long as the group. There is one watch for
  all processes that train together, over the logs of all their axes: a process that others wait for in one axis may
  itself be waiting in another.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ds_hf.config.mesh import MeshShape, given_claims, is_sequence_mpu, require_features
from ds_hf.engine.comm.log import CollectiveLog, get_all, open_board
from ds_hf.engine.comm.mpu import check_groups
from ds_hf.engine.comm.watch import Watch
from ds_hf.errors import ConfigError

__all__ = [
    "Axis",
    "Mesh",
    "axis_of",
    "compute_device",
    "data_parallel_axis",
    "group_of",
    "host_group",
    "watch_for_hangs",
]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        group: the process group, ``None`` for torch's default group.
        rank: this process's position along the axis.
        world_size: number of processes along the axis.
        log: what this process issued on the axis; one for all engines on the same group.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    log: CollectiveLog = field(default_factory=CollectiveLog, compare=False, repr=False)

    def global_rank(self, rank: int) -> int:
        """Global rank of the process at position ``rank`` of this axis."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def axis_rank(self, rank: int) -> int:
        """Position along this axis of the process with global rank ``rank``.

        Raises:
            ValueError: that process is not on this axis.
        """
        return rank if self.group is None else dist.get_group_rank(self.group, rank)

    def in_place_of(self, rank: int) -> int:
        """Position of the process with global rank ``rank``; on an axis without it that of the one with as many before
        it, which is the first one for rank 0."""
        members = [self.global_rank(place) for place in range(self.world_size)]
        before = sum(member < rank for member in members)
        return members.index(rank) if rank in members else min(before, self.world_size - 1)


class Mesh:
    """The processes of one engine along named axes.

    Process groups are made when an axis is first asked for, which all processes do in the same order, so only those
    exist that something uses. Ranks are numbered pipe, data, sequence, tensor, from the outermost to the innermost,
    unless ``order`` says otherwise.

    Args:
        axes: those that an ``mpu`` has made, and no others can be.
        order: names of axes, from the outermost to the innermost, of a topology that numbers ranks in its own way.
        layers_given: the author of the model has divided layers over the tensor axis.

    Attributes:
        shape: number of processes along each axis.
        world: all processes that train the model together.
        sums_sequence: gradients are summed over the processes of a sequence, and averaged over samples alone
            (``ds_hf.sequence_gradients``).
        data_before_experts: processes that hold the same experts are neighbours, and not those that divide them
            (``use_data_before_expert_parallelism``).
    """

    sums_sequence = False
    data_before_experts = False

    def __init__(
        self,
        shape: MeshShape,
        axes: Mapping[frozenset[str], Axis] | None = None,
        *,
        order: Sequence[str] = (),
        layers_given: bool = False,
    ) -> None:
        self.shape = shape
        self._axes = dict(axes or {})
        self._spans: dict[tuple[Any, ...], Axis | None] = {}
        self._given = axes is not None
        self._order, self._layers_given = tuple(order), layers_given
        self.world = self._axes.get(_WORLD) or axis_of(None, "world")

    @classmethod
    def given(cls, mpu: Any, shape: MeshShape, *, divided: bool = True) -> Mesh:
        """The mesh whose groups an ``mpu`` has made. All processes call it.

        Args:
            divided: the model's author has divided its layers over them; else the engine does.

        Raises:
            ConfigError: on every process, where the groups of one are not as ``shape`` says.
        """
        if shape.sequence > 1:
            return cls._of_sequences(mpu, shape)
        if shape.model == 1:  # the group may be a part of all processes: the others train something else
            data = axis_of(mpu.get_data_parallel_group(), "data")
            if shape.inner is not None and data.world_size != dist.get_world_size():
                raise ConfigError(
                    f"states are to be divided over groups of {shape.inner}, which all processes make together, and "
                    f"the data-parallel group of the mpu is {data.world_size} of {dist.get_world_size()} processes: "
                    "remove mics_shard_size and zero_hpz_partition_size",
                    "initialize(mpu=...)",
                )
            return cls(shape, {frozenset(): data, _DATA: data, _WORLD: data})
        data_group, tensor_group = check_groups(mpu, shape)
        data, tensor = axis_of(data_group, "data"), axis_of(tensor_group, "tensor")
        mesh = cls(shape, {_DATA: data, _TENSOR: tensor, _WORLD: axis_of(None, "world")})
        mesh._given = divided
        return mesh

    @classmethod
    def _of_sequences(cls, mpu: Any, shape: MeshShape) -> Mesh:
        """A mesh of its own, which takes over the group of the processes that share a sequence."""
        if shape.model > 1:
            raise ConfigError(
                f"sequences are shared by {shape.sequence} processes whose groups are made already (sp_size of "
                "accelerate's ParallelismConfig, or mpu=), and they have no room for processes that share layers: "
                "leave out one of the two; in a loop of your own give sequence_parallel_size in the file, and no mpu",
                _MPU,
            )
        mesh = cls(shape)
        group = mpu.get_sequence_parallel_group()
        given = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        me = dist.get_rank()
        first = me - me % shape.sequence
        wanted = list(range(first, first + shape.sequence))
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, given if given != wanted else None)
        if wrong := [f"rank {rank}: {ranks}" for rank, ranks in enumerate(faults) if ranks is not None]:
            message = f"processes that share a sequence have consecutive ranks, but the mpu says {'; '.join(wrong[:4])}"
            raise ConfigError(message, _MPU)
        if shape.sequence < dist.get_world_size():
            mesh._axes[_SEQUENCE] = axis_of(group, "sequence")
        return mesh

    @property
    def is_given(self) -> bool:
        """The groups, and a model divided over them, were given: values are never averaged or broadcast over the
        model-parallel one."""
        return self._given or self._layers_given

    @property
    def axes(self) -> list[Axis]:
        """Those that exist so far, all processes first."""
        made = (*self._axes.values(), *(axis for axis in self._spans.values() if axis is not None))
        return [self.world, *(axis for axis in made if axis.log is not self.world.log)]

    def axis(self, *dims: str) -> Axis:
        """The processes that differ from this one in ``dims`` alone: of "pipe", "data", "sequence", "tensor", and for
        hierarchical ZeRO "inner" and "outer", which divide data x sequence: neighbours, and those that have the same
        place among theirs. Collective where it is asked for first.

        Raises:
            ValueError: an ``mpu`` gave no group for them.
        """
        sizes = self._sizes(dims)
        wanted = frozenset(dim for dim in dims if sizes[dim] > 1)
        if not self._given and math.prod(sizes[dim] for dim in wanted) == self.world.world_size:
            return self.world
        key = _DATA if self._given and wanted <= {"data", "sequence"} else wanted
        if {"inner", "outer"} & set(dims):  # also where there is one process along them
            key = frozenset(dims)
        if key not in self._axes:
            lists = self._lists_of_given(dims) if self._given else _ranks_along(sizes, wanted)
            self._axes[key] = axis_of(group_of(lists), " x ".join(dims))
        return self._axes[key]

    def spanning(self, stages: Sequence[int], *dims: str) -> Axis | None:
        """The processes of some stages of the pipeline that differ from this one in the stage and in ``dims`` alone;
        ``None`` on other stages. Collective where it is asked for first."""
        chosen = sorted(set(stages))
        if len(chosen) in (1, self.shape.pipe):
            axis = self.axis(*dims) if len(chosen) == 1 else self.axis("pipe", *dims)
            return axis if self.stage_rank in chosen else None
        key = (*chosen, *sorted(dims))
        if key not in self._spans:
            sizes = self._sizes(())
            by_stage = _ranks_along(sizes, frozenset(sizes) - {"pipe"})
            there = {rank for stage in chosen for rank in by_stage[stage]}
            every = _ranks_along(sizes, frozenset({"pipe", *dims}))
            lists = [[rank for rank in ranks if rank in there] for ranks in every]
            group = group_of(lists)
            name = " x ".join([f"stages {', '.join(map(str, chosen))}", *dims])
            self._spans[key] = axis_of(group, name) if self.stage_rank in chosen else None
        return self._spans[key]

    def leave_layers_to_engine(self) -> None:
        """The engine divides layers over the tensor axis: then whole parameters have replicas there, too."""
        self._layers_given = False

    def lists_along(self, *dims: str) -> list[list[int]]:
        """Global ranks of the processes along ``dims``, for every place in the other axes."""
        return _ranks_along(self._sizes(dims), frozenset(dims))

    @property
    def stage_rank(self) -> int:
        """Which stage of the pipeline this process is in."""
        return self.axis("pipe").rank if self.shape.pipe > 1 else 0

    @property
    def stage(self) -> Axis:
        """The processes of this one's stage: all of them without a pipeline."""
        return self.world if self.shape.pipe == 1 else self.axis("data", "sequence", "tensor")

    def _lists_of_given(self, dims: Sequence[str]) -> list[list[int]]:
        """Global ranks of the groups along "inner" or "outer", for every data-parallel group of the ``mpu``."""
        if tuple(dims) not in (("inner",), ("outer",)):
            raise ValueError(f"the mpu has made no group of processes along {' x '.join(dims)}")
        data, inner = self._axes[_DATA], self.shape.inner or 1
        mine = [data.global_rank(rank) for rank in range(data.world_size)]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine if data.rank == 0 else None)  # each group once
        rows = [torch.tensor(row).view(-1, inner) for row in sorted(row for row in every if row is not None)]
        return [group for row in rows for group in (row if dims[0] == "inner" else row.T).tolist()]

    @property
    def replicas(self) -> Axis:
        """The processes that hold the same part of the model: data x sequence."""
        return self.axis("data", "sequence")

    @property
    def inner(self) -> Axis | None:
        """The neighbours among the replicas over which hierarchical ZeRO divides states, ``None`` without it."""
        return None if self.shape.inner is None else self.axis("inner")

    @property
    def outer(self) -> Axis | None:
        """The replicas that have this one's place among their neighbours, ``None`` without hierarchical ZeRO."""
        return None if self.shape.inner is None else self.axis("outer")

    @property
    def experts(self) -> tuple[Axis, Axis]:
        """``experts_over`` for as many processes as the shape says."""
        return self.experts_over(self.shape.expert)

    def experts_over(self, size: int) -> tuple[Axis, Axis]:
        """Of experts that are divided over ``size`` processes: the replicas that divide them among each other, and
        those that hold the same ones as this one. Collective where it is asked for first.

        Raises:
            ValueError: see ``neighbours``.
        """
        replicas = self.shape.data * self.shape.sequence
        if self.data_before_experts:
            same, parts = self.neighbours(replicas // size)
        else:
            parts, same = self.neighbours(size)
        return (self.replicas if parts.world_size == replicas else parts), same

    def neighbours(self, size: int) -> tuple[Axis, Axis]:
        """The replicas in groups of ``size`` neighbours: this process's group, and the processes that have its place
        in theirs. Collective where it is asked for first.

        Raises:
            ValueError: the size does not divide the replicas, or an ``mpu`` has made the groups.
        """
        if self.inner is not None and self.outer is not None and size == self.shape.inner:
            return self.inner, self.outer
        replicas = self.shape.data * self.shape.sequence
        if replicas % size or self.is_given or self.world.world_size != dist.get_world_size():
            raise ValueError(f"{replicas} replicas cannot be put into groups of {size}")
        sizes = {"pipe": self.shape.pipe, "far": replicas // size, "near": size, "tensor": self.shape.tensor}
        first = [name for name in self._order if name in sizes]
        sizes = {name: sizes[name] for name in (*first, *(name for name in sizes if name not in first))}
        for name in ("near", "far"):
            key = frozenset({name, str(size)})
            if key not in self._axes:
                lists = _ranks_along(sizes, frozenset({name}))
                self._axes[key] = axis_of(group_of(lists), f"{name} ({size})")
        return self._axes[frozenset({"near", str(size)})], self._axes[frozenset({"far", str(size)})]

    def sharing_neighbours(self, size: int) -> Axis:
        """The processes that share layers in groups of ``size`` neighbours: this process's group. Collective where it
        is asked for first."""
        axis, key = self.axis("tensor"), frozenset({"tensor", str(size)})
        if size == axis.world_size:
            return axis
        if key not in self._axes:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, tuple(axis.global_rank(rank) for rank in range(axis.world_size)))
            lists = [[*ranks[at : at + size]] for ranks in sorted(set(every)) for at in range(0, len(ranks), size)]
            self._axes[key] = axis_of(group_of(lists), f"tensor ({size})")
        return self._axes[key]

    @property
    def sample_rank(self) -> int:
        """Which of the ``shape.data`` shares of the samples this process reads."""
        return self.replicas.rank // self.shape.sequence

    def _sizes(self, dims: Sequence[str]) -> dict[str, int]:
        """Of all axes, from the outermost to the innermost."""
        shape = self.shape
        sizes = {"pipe": shape.pipe, "data": shape.data, "sequence": shape.sequence, "tensor": shape.tensor}
        if {"inner", "outer"} & set(dims):
            replicas = shape.data * shape.sequence
            inner = shape.inner or replicas
            sizes = {"pipe": shape.pipe, "outer": replicas // inner, "inner": inner, "tensor": shape.tensor}
        first = [name for name in self._order if name in sizes]
        return {name: sizes[name] for name in (*first, *(name for name in sizes if name not in first))}


_DATA, _TENSOR, _WORLD = frozenset({"data"}), frozenset({"tensor"}), frozenset({"world"})
_SEQUENCE = frozenset({"sequence"})
_MPU = "initialize(mpu=...)"


def _ranks_along(sizes: Mapping[str, int], dims: frozenset[str]) -> list[list[int]]:
    """Global ranks of the groups of processes along ``dims``, for every place in the other axes."""
    names = list(sizes)
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    order = [names.index(name) for name in names if name not in dims] + [
        names.index(name) for name in names if name in dims
    ]
    length = math.prod(sizes[name] for name in dims)
    found: list[list[int]] = ranks.permute(order).reshape(-1, length).tolist()
    return found


def group_of(lists: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """This process's group of those with the global ranks ``lists``; it waits as long as the group of all processes.
    Collective among all."""
    _agree_on_names(_LOGS.of(None))
    timeout = timedelta(seconds=_group_timeout(None))
    group, _ = dist.new_subgroups_by_enumeration(lists, timeout, backend)  # type: ignore[no-untyped-call]
    return group  # type: ignore[no-any-return]


def _agree_on_names(log: CollectiveLog) -> None:
    """torch calls a new group by how many groups each process has made, and from 2.15 on counts those, too, that some
    made among themselves (accelerate does where layers are shared): others would wait for the name forever.

    Args:
        log: of all processes.
    """
    if log.store is None:
        return
    log.groups += 1
    store, made = PrefixStore(f"names/{log.groups}", log.store), dist.distributed_c10d._world
    with contextlib.suppress(RuntimeError):  # a store that cannot do it; torch's fake one may answer with nothing
        store.set(str(dist.get_rank()), str(made.group_count))
        counts = get_all(store, [str(rank) for rank in range(dist.get_world_size())])
        made.group_count = max([made.group_count, *(int(count) for count in counts if count)])


# -- logs and the watch over them --------------------------------------------------------------------------------------


class Logs:
    """Logs by process group, and who watches them."""

    def __init__(self) -> None:
        self._logs: WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = WeakKeyDictionary()
        # Names of groups come again after torch's default group was destroyed and made anew, maybe in the same store.
        self._worlds: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._watches: list[Watch] = []

    def of(self, group: dist.ProcessGroup | None, name: str = "") -> CollectiveLog:
        """The log of ``group``, by default of all processes. All processes of the group call it first together.

        Args:
            name: what reports call the axis; the first name given stays.
        """
        key = dist.group.WORLD if group is None else group
        assert key is not None
        if key not in self._logs:
            self._logs[key] = self._made(key)
        log = self._logs[key]
        log.name = log.name or name
        return log

    def _made(self, group: dist.ProcessGroup) -> CollectiveLog:
        world = dist.group.WORLD
        assert world is not None
        if world not in self._worlds:
            self._worlds[world] = next(self._numbers)
        ranks = dist.get_process_group_ranks(group)
        log = CollectiveLog(ranks, key=f"{self._worlds[world]}/{group.group_name}/{ranks[0]}")
        if len(ranks) > 1:
            log.store = store = PrefixStore(f"ds_hf/{log.key}", _get_default_store())
            with contextlib.suppress(RuntimeError):  # a store that cannot do it: no board then
                log.board = open_board(store, dist.get_rank(group), len(ranks))
            for watch in self._watches:
                watch.take_in(log)
        return log

    def watch(self, log: CollectiveLog, timeout: float) -> None:
        """Watch ``log`` and those of all groups of its processes, now and later; 0 for no watch. All processes of the
        log call it; a second call sets the time of the watch that is there."""
        if log.watch is not None:
            log.watch.timeout = timeout or float("inf")
        elif timeout and log.store is not None:
            with contextlib.suppress(RuntimeError):  # a store that has no second connection
                connection: Any = log.store
                watch = Watch(connection.clone(), dist.get_rank(), log.ranks, timeout)
                self._watches = [each for each in self._watches if each.lives] + [watch]
                for each in [log, *self._logs.values()]:
                    watch.take_in(each)
                watch.start()


_LOGS = Logs()


def axis_of(group: dist.ProcessGroup | None, name: str = "") -> Axis:
    """The axis along ``group``, by default all processes; ``name`` is for reports of hangs."""
    return Axis(group, dist.get_rank(group), dist.get_world_size(group), _LOGS.of(group, name))


def host_group(axis: Axis) -> Any:
    """A group of the processes on ``axis``, two or more, that reduces tensors in host memory. They call it together.

    torch's ``new_group`` for some of the processes calls a group by how many each of them has, so that they never meet
    where these differ: accelerate makes one of the first processes alone where layers are shared.
    """
    log = axis.log
    assert log.store is not None
    log.groups += 1
    store = PrefixStore(f"host/{log.groups}", log.store)
    return dist.ProcessGroupGloo(store, axis.rank, axis.world_size, timedelta(seconds=_group_timeout(axis.group)))


def data_parallel_axis(mpu: Any = None, group: dist.ProcessGroup | None = None) -> Axis:
    """The axis along which parameters are sharded before there is a mesh: ``group``, or the data-parallel group of a
    Megatron-style ``mpu``, or all processes.

    Raises:
        ConfigError: ``mpu`` needs what the engine does not have.
    """
    if mpu is not None:
        require_features(given_claims(mpu=mpu))
        if group is None and not is_sequence_mpu(mpu):
            group = mpu.get_data_parallel_group()
    return axis_of(group)


def watch_for_hangs(mesh: Mesh, timeout: float | None) -> None:
    """Have a thread report when ranks diverge on any axis of the mesh, see ``watch``. All ranks call it; a second call
    sets the time.

    Args:
        timeout: seconds without progress after which a rank that others wait for is said to hang; ``None`` for nine
            tenths of the group's own timeout, so that the report comes before torch's; 0 for no watch.
    """
    _LOGS.watch(mesh.world.log, 0.9 * _group_timeout(mesh.world.group) if timeout is None else timeout)


def _group_timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that torch lets a collective of the group take."""
    key = dist.group.WORLD if group is None else group
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return float(key._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # a backend that torch does not ship
        return dist.default_pg_timeout.total_seconds()


def compute_device() -> torch.device:
    """Where this process computes: its CUDA device (``LOCAL_RANK`` picks it if none was set), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if local_rank >= 0 and torch.cuda.current_device() == 0 and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", torch.cuda.current_device())
