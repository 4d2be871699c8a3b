"""Chooses where parameters rest and optimizer states live, from the plan and the offload sections; for the builder."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch.optim import Optimizer

from ds_hf import host
from ds_hf.config.optimizer_traits import most_moments
from ds_hf.config.plan import StatePlan
from ds_hf.config.types import Config
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.offload.aio import Aio
from ds_hf.engine.offload.folder import SwapFolder, examine
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.engine.ops.cpu import THREADS_VARIABLE
from ds_hf.engine.optim.base import TensorwiseOptimizer
from ds_hf.engine.optim.file_store import FileStore
from ds_hf.engine.optim.host_store import DelayedStore, HostStore
from ds_hf.engine.optim.store import DeviceStore, HostSettings, StateStore
from ds_hf.engine.optim.stream_share import AutoShare, Room, say_none, slots_room
from ds_hf.engine.optim.streaming import Narrow, streamed_update
from ds_hf.engine.optim.zenflow.requirements import check_zenflow
from ds_hf.engine.optim.zenflow.store import ZenFlowStore
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.storage import DeviceShardStorage, FetchOrder, FileShardStorage, HostShardStorage, ShardStorage
from ds_hf.host import rank_cores
from ds_hf.log import log_once, logger, warn_once
from ds_hf.printable import counted

__all__ = ["Offload", "accumulation_dtype", "build_offload"]


@dataclass(frozen=True)
class _Machine:
    """Where and for how many elements: ``numel`` of this rank's shards."""

    world: Axis
    device: torch.device
    trained: int
    numel: int


class Offload:
    """What the configuration says, as objects.

    Attributes:
        store: for the optimizer states of the engine.

    Args:
        promised: bytes that the store's files will have, on its disk.
    """

    def __init__(
        self, store: StateStore, settings: Config, plan: StatePlan, machine: _Machine, promised: int = 0
    ) -> None:
        self.store = store
        self._section = settings.zero_optimization.offload_param
        self._where, self._device = plan.parameters.device, machine.device
        self._in_host_memory = 0
        self._pool: SwapPool | None = None
        if self._where == "nvme":
            nbytes = 2 * max(0, machine.numel - self._section.max_in_cpu)
            slots, path = self._section.buffer_count, self._section.nvme_path
            pinned = self._section.pin_memory
            if not _same_disk(path, settings.zero_optimization.offload_optimizer.nvme_path):
                promised = 0
            self._pool = _pool(
                settings, machine.world, "parameters", str(path), slots, nbytes, pinned, promised=promised
            )
        self._order = FetchOrder(depth=1 if self._pool is None else max(1, self._section.buffer_count - 2))

    @cached_property
    def _link(self) -> HostLink:
        return HostLink(self._device)

    def shard_storage(self, name: str, numel: int, *, sharded: bool) -> ShardStorage | None:
        """Where the shard of one more buffer rests, ``None`` for one that is not sharded.

        Args:
            name: of the buffer.
            numel: of the rank's shard.
        """
        if not sharded:
            return None
        if self._where == "device":
            return DeviceShardStorage(self._device, self._device)
        if self._pool is not None and self._in_host_memory + numel > self._section.max_in_cpu:
            return FileShardStorage(self._pool, self._link, self._order, f"{name}.weights")
        self._in_host_memory += numel
        return HostShardStorage(self._link, self._order, pinned=self._section.pin_memory)


def build_offload(
    settings: Config,
    plan: StatePlan,
    mesh: Mesh,
    device: torch.device,
    parameters: list[torch.nn.Parameter],
    inner: Optimizer | None,
    *,
    splits_masters: bool = False,
) -> Offload:
    """The objects for one engine. Files are made, and disks tried, where something goes to NVMe.

    Args:
        splits_masters: where masters are updated by the device, they may be split.

    Raises:
        OffloadError: a disk cannot be used, or has too little space.
    """
    shards, parts = (
        mesh.replicas.world_size if over == "replicas" or mesh.shape.inner is None else mesh.shape.inner
        for over in (plan.optimizer.over, plan.parameters.over)
    )
    listed = [p for group in inner.param_groups for p in group["params"]] if inner is not None else []
    trained = {id(p): p for p in listed if p.requires_grad}
    machine = _Machine(
        mesh.world,
        device,
        trained=sum(logical_shape(p).numel() for p in trained.values()) // shards,
        numel=sum(logical_shape(p).numel() for p in parameters) // parts,
    )
    store: StateStore = DeviceStore(device, accumulation_dtype(plan))
    promised = 0
    if inner is not None and settings.zero_optimization.zenflow is not None:
        check_zenflow(mesh, inner)
    if inner is not None and plan.optimizer.device == "cpu":
        store = _host_store(settings, plan, machine, inner, splits_masters=splits_masters)
    elif inner is not None and plan.optimizer.device == "nvme":
        store, promised = _file_store(settings, plan, machine, inner)
    return Offload(store, settings, plan, machine, promised)


def _host_store(
    settings: Config, plan: StatePlan, machine: _Machine, inner: Optimizer, *, splits_masters: bool
) -> HostStore:
    section, own = settings.zero_optimization.offload_optimizer, settings.ds_hf.offload
    ratio = section.ratio if own.ratio is None else own.ratio
    share, streamed = (0.0 if ratio == "auto" else 1.0 - float(ratio)), 0.0 if own.stream == "auto" else own.stream
    room = Room(machine.device, machine.world) if ratio == "auto" else None
    if settings.zero_optimization.zenflow is not None:
        share, streamed, room = 0.0, 0.0, None  # the rules have said so
    by_unit = streamed_update(inner, Narrow()) is not None
    if not by_unit and (share or streamed or room or own.delayed):
        warn_once(
            f"{type(inner).__name__} does not update unit after unit: all of its states stay in host memory, ratio and "
            "ds_hf.offload have no effect"
        )
        share, streamed, room = 0.0, 0.0, None
    kept = _host_settings(settings, plan, machine, inner, share, streamed)
    kept = dataclasses.replace(kept, split=splits_masters, room=room_for_streams(machine.device))
    _look_for_memory(kept, plan)
    store: HostStore
    if settings.zero_optimization.zenflow is not None:
        store = ZenFlowStore(machine.device, kept, settings.zero_optimization.zenflow)
    elif own.delayed and by_unit:
        store = DelayedStore(machine.device, kept, room)
    else:
        auto = auto_share_of(settings, machine, inner, by_unit) if own.stream == "auto" else None
        store = HostStore(machine.device, kept, room, auto=auto)
    log_once(
        f"offload: the CPU updates with {counted(store.worker.threads, 'thread', 'threads')} a process, of "
        f"{counted(len(rank_cores()), 'core', 'cores')} "
        f"(OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}; {THREADS_VARIABLE} sets another number)"
    )
    return store


def auto_share_of(settings: Config, machine: _Machine, inner: Optimizer, by_unit: bool) -> AutoShare | None:
    """What decides "auto"; ``None`` where streaming cannot pay, whatever the sizes."""
    reason = ""
    if machine.device.type != "cuda":
        reason = "the model does not compute on a CUDA device"
    elif not by_unit or isinstance(inner, TensorwiseOptimizer):
        reason = f"{type(inner).__name__} does not update unit after unit"
    elif not settings.zero_optimization.offload_optimizer.pin_memory:
        reason = "their memory is not page-locked (pin_memory)"
    if reason:
        say_none(reason)
        return None
    return AutoShare(machine.device, machine.world, host.local_world_size())


def room_for_streams(device: torch.device) -> int:
    """Bytes of the device for states on their way, with a share that the user gives."""
    return slots_room(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def _look_for_memory(kept: HostSettings, plan: StatePlan) -> None:
    """Say it now if host memory will not do: the kernel would end the process without a word, some steps later."""
    assert plan.optimizer.dtype is not None
    states = getattr(torch, plan.optimizer.dtype).itemsize + 2 * getattr(torch, plan.moments).itemsize
    gradients = 2 + (kept.accumulation_dtype.itemsize if kept.accumulates else 0)
    needed = int(kept.numel * (1 - kept.device_share) * (states + gradients)) * host.local_world_size()
    available = host.available_memory()
    if needed > available:
        warn_once(
            f"offload needs about {needed / 2**30:.0f} GiB of host memory ({host.local_world_size()} processes), and "
            f"{available / 2**30:.0f} GiB are available: use NVMe (stage 3), more hosts, or "
            "bf16.bf16_master_weights_and_grads with bf16_optimizer_states, which need half"
        )


def _file_store(settings: Config, plan: StatePlan, machine: _Machine, inner: Optimizer) -> tuple[FileStore, int]:
    """The store, and how many bytes its files will have: they are written later than the disk is looked at."""
    section = settings.zero_optimization.offload_optimizer
    assert plan.optimizer.dtype is not None
    width = getattr(torch, plan.optimizer.dtype).itemsize + _moments_nbytes(plan, inner)
    slots, path, nbytes = max(3, section.buffer_count), str(section.nvme_path), machine.trained * width
    pool = _pool(settings, machine.world, "optimizer states", path, slots, nbytes, pinned=False)
    return FileStore(machine.device, _host_settings(settings, plan, machine, inner), pool), nbytes


def _moments_nbytes(plan: StatePlan, inner: Optimizer) -> int:
    """Of one element."""
    return most_moments(type(inner).__name__) * int(getattr(torch, plan.moments).itemsize)


def _host_settings(
    settings: Config,
    plan: StatePlan,
    machine: _Machine,
    inner: Optimizer,
    share: float = 0.0,
    streamed: float = 0.0,
) -> HostSettings:
    return HostSettings(
        numel=machine.trained,
        device_share=share,
        streamed_share=streamed,
        pinned=settings.zero_optimization.offload_optimizer.pin_memory,
        accumulates=plan.reduces_every_micro_batch and (settings.gradient_accumulation_steps or 1) > 1,
        accumulation_dtype=accumulation_dtype(plan),
        moments_nbytes=_moments_nbytes(plan, inner),
    )


def _same_disk(*folders: object) -> bool:
    """Whether folders, made already or not, are on one file system."""
    paths = [Path(str(folder)).absolute() for folder in folders]
    there = [next(path for path in (folder, *folder.parents) if path.exists()) for folder in paths]
    return len({path.stat().st_dev for path in there}) == 1


def _pool(
    settings: Config, axis: Axis, what: str, path: str, slots: int, nbytes: int, pinned: bool, promised: int = 0
) -> SwapPool:
    """Files for ``what``, ``nbytes`` in all for this process, on a disk that was tried.

    Args:
        promised: what else this process will write there.
    """
    aio = settings.aio
    queue = Aio(block=aio.block_size, depth=aio.queue_depth, threads=aio.intra_op_parallelism)
    folder = SwapFolder(path)
    disk = examine(folder, queue, nbytes + promised, host.local_world_size())
    if axis.rank == 0:
        level = logging.INFO if disk.direct else logging.WARNING  # the page cache takes the host's memory and time
        logger.log(level, "%s on NVMe: %.2f GiB a process in %s; %s", what, nbytes / 2**30, path, disk)
    return SwapPool(folder, queue, slots, pinned=pinned)


def accumulation_dtype(plan: StatePlan) -> torch.dtype:
    """Of sums of gradients over micro-batches."""
    dtype: torch.dtype = getattr(torch, plan.gradients.dtype) if plan.gradients.dtype else torch.float32
    return dtype
