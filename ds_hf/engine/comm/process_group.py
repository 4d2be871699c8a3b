"""The default process group: created once, reused ever after.

``init_distributed`` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, makes a group of one
process when nothing is set (no port, no environment needed), and reuses a group that exists already. It creates
torch's *default* group, because accelerate and transformers go on with ``torch.distributed`` itself; the collectives
below are torch's own.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import (
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    get_global_rank,
    get_rank,
    get_world_size,
    init_process_group,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from ds_hf.engine.comm.discovery import discover
from ds_hf.engine.comm.failure_record import record_failures
from ds_hf.errors import DsHfError
from ds_hf.log import logger

__all__ = [
    "DistributedError",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "current_rank",
    "destroy_process_group",
    "gather",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "release_before_shutdown",
    "scatter",
    "send",
]

DEFAULT_PORT = 29500
LAUNCH_HINT = (
    "start the script with `torchrun --nproc-per-node N script.py ...`, which sets all of them; under mpirun on "
    "several hosts say `-x MASTER_ADDR=FIRST_HOST` (or install mpi4py, which finds it)"
)


class DistributedError(DsHfError, RuntimeError):
    """The processes of a run cannot find each other, or were started with contradictory settings."""


@dataclass(frozen=True)
class Rendezvous:
    """Where and as whom this process joins the run; ``address`` None: it is alone."""

    rank: int
    world_size: int
    address: str | None = None
    port: int = DEFAULT_PORT

    def at(self, init_method: str | None = None) -> str:
        """The sentence's end: as whom and where."""
        place = f"{self.address}:{self.port}" if self.address else "no address (single process)"
        return f"rank {self.rank} of {self.world_size} at {init_method or place}"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create torch's default process group unless there is one already.

    Args:
        dist_backend: ``"nccl"``, ``"gloo"``, ...; None takes nccl when CUDA is there and gloo otherwise.
        auto_mpi_discovery: read mpirun's or srun's variables when torchrun's are absent, and set torchrun's.
        distributed_port: port of the rendezvous when MASTER_PORT is not set.
        verbose: log what was created, on rank 0.
        timeout: limit of one collective; None keeps torch's.
        init_method: a torch URL such as ``tcp://host:port`` or ``file:///path``; needs ``rank`` and ``world_size``
            as arguments or in the environment.
        dist_init_required: False promises that the group exists already; it is an error when it does not.
        config: accepted for DeepSpeed's signature; the configuration is read by ``initialize``.
        rank: overrides RANK.
        world_size: overrides WORLD_SIZE.
    """
    if is_initialized():
        return
    if dist_init_required is False:
        raise DistributedError(
            "dist_init_required=False, but there is no process group: call deepspeed.init_distributed() or "
            "torch.distributed.init_process_group() first, or leave dist_init_required out"
        )
    backend = dist_backend or default_backend()
    record_failures()
    found = discover(os.environ) if auto_mpi_discovery else {}
    env = {**os.environ, **found}
    where = find_rendezvous(env, port=distributed_port, rank=rank, world_size=world_size, need_address=not init_method)
    if "nccl" in backend:
        torch.cuda.set_device(_local_device(env))
    _create_group(backend, where, init_method, timeout)
    os.environ.update(found)  # accelerate, transformers and scripts read them
    if "gloo" in backend:
        atexit.register(_destroy_at_exit)
    if verbose and where.rank == 0:
        logger.info("process group: backend %s, world size %d", backend, where.world_size)


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """As torch's, which is asked for when this is called: it may have been wrapped since."""
    torch.distributed.destroy_process_group(group)


class Releases(Protocol):
    """What holds captured collectives."""

    def release(self) -> None:
        """Let go of them."""


_captured: weakref.WeakSet[Releases] = weakref.WeakSet()


def release_before_shutdown(holder: Releases) -> None:
    """Call ``holder.release()`` before process groups are destroyed and at exit, if it still lives then.

    NCCL destroys a communicator only when no CUDA graph holds one of its collectives any more, and waits for that.
    """
    _wrap_shutdown()
    _captured.add(holder)


@functools.cache
def _wrap_shutdown() -> None:
    destroy = torch.distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_released(group: ProcessGroup | None = None) -> None:
        _release()
        destroy(group)

    torch.distributed.destroy_process_group = torch.distributed.distributed_c10d.destroy_process_group = (
        destroy_released
    )
    atexit.register(_release)


def _release() -> None:
    for holder in list(_captured):
        holder.release()
    _captured.clear()


def _destroy_at_exit() -> None:
    """End gloo's worker threads while Python still runs.

    One that holds the last reference to a tensor needs the interpreter to free it, and aborts the process when that is
    gone ("terminate called without an active exception", one run in ten on a busy machine). After an exception the
    peers are gone too, and waiting for them could take the whole timeout.
    """
    if is_initialized() and not hasattr(sys, "last_value"):
        destroy_process_group()


def default_backend() -> str:
    """The backend of this machine: nccl with a CUDA device, gloo without."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def get_local_rank() -> int:
    """Index of this process among those of its machine (LOCAL_RANK)."""
    local_rank = _integer({**os.environ, **discover(os.environ)}, "LOCAL_RANK")
    if local_rank is not None:
        return local_rank
    if is_initialized() and get_world_size() > 1:
        raise DistributedError(f"LOCAL_RANK is not set though world size is {get_world_size()}; {LAUNCH_HINT}")
    return 0


def get_world_group() -> ProcessGroup:
    """The group of all ranks."""
    group = torch.distributed.group.WORLD
    if group is None:
        raise DistributedError("there is no process group yet: call deepspeed.init_distributed() first")
    return group


def find_rendezvous(
    env: Mapping[str, str],
    *,
    port: int = DEFAULT_PORT,
    rank: int = -1,
    world_size: int = -1,
    need_address: bool = True,
) -> Rendezvous:
    """Read who this process is from ``env`` (arguments win); complain about all that is missing at once."""
    found_rank = rank if rank >= 0 else _integer(env, "RANK")
    found_size = world_size if world_size >= 0 else _integer(env, "WORLD_SIZE")
    if found_rank is None and found_size in (None, 1):
        return Rendezvous(0, 1)
    missing = [name for name, value in (("RANK", found_rank), ("WORLD_SIZE", found_size)) if value is None]
    address = env.get("MASTER_ADDR")
    if not address and need_address and found_size != 1:
        missing.append("MASTER_ADDR")
    if missing or found_rank is None or found_size is None:
        present = {name: env[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in env}
        raise DistributedError(
            f"{', '.join(missing)} not set, though there is {present or 'the rest as arguments'}; {LAUNCH_HINT}"
        )
    if not 0 <= found_rank < found_size:
        raise DistributedError(
            f"RANK is {found_rank} but WORLD_SIZE is {found_size}: ranks go from 0 to WORLD_SIZE - 1"
        )
    env_port = _integer(env, "MASTER_PORT")
    return Rendezvous(found_rank, found_size, address or None, port if env_port is None else env_port)


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise DistributedError(f"{name} is {text!r}, which is not a whole number") from None


def _local_device(env: Mapping[str, str]) -> int:
    """The CUDA device of this process: LOCAL_RANK, or 0 when each process sees only its own."""
    count = torch.cuda.device_count()
    local_rank = _integer(env, "LOCAL_RANK")
    if local_rank is None:
        return torch.cuda.current_device()
    if count == 1:
        return 0
    if count == 0:
        raise DistributedError("the backend nccl needs a GPU, and none is visible: leave the backend out, or give gloo")
    if local_rank >= count:
        raise DistributedError(
            f"LOCAL_RANK is {local_rank} but only {count} CUDA devices are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): start at most {count} processes"
        )
    return local_rank


_RESOLVE_S = 20.0  # for names that a cluster makes known late


def _resolve(address: str) -> None:
    """Wait until the name of the first host is known, for names of pods come late; torch would try for half an hour.

    Raises:
        DistributedError: it is not known after ``_RESOLVE_S``.
    """
    until = time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError, ValueError) as error:
            if time.monotonic() > until or not isinstance(error, OSError):
                raise DistributedError(
                    f"MASTER_ADDR is {address!r:.200}, which is no known host ({error}): give the name or the address "
                    "of the host of rank 0"
                ) from error
        time.sleep(1.0)


def _create_group(backend: str, where: Rendezvous, init_method: str | None, timeout: timedelta | None) -> None:
    options: dict[str, Any] = {"rank": where.rank, "world_size": where.world_size, "timeout": timeout}
    if init_method:
        options["init_method"] = init_method
    elif where.world_size == 1 and where.address is None:
        options["store"] = HashStore()
    elif _torch_reads_everything(where):
        # Only env:// lets torchrun's agent host the store, so prefer it whenever the variables are all there.
        options["init_method"] = "env://"
    else:
        options["init_method"] = f"tcp://{where.address}:{where.port}"
    # Imported later, by whichever library, its functions would have the group as a default argument and keep it for
    # ever, and with it gloo's threads: ``_destroy_at_exit``.
    import torch.distributed.nn.functional  # noqa: F401

    if where.address is not None and not init_method:
        _resolve(where.address)
    try:
        init_process_group(backend, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise DistributedError(
            f"could not create the {backend} process group as {where.at(init_method)}: {error}\n"
            "  check that every rank was started, that all use the same MASTER_ADDR and MASTER_PORT, that the port is "
            "free and reachable, and that the backend is built into this torch"
        ) from error


def _torch_reads_everything(where: Rendezvous) -> bool:
    known = {
        "RANK": where.rank,
        "WORLD_SIZE": where.world_size,
        "MASTER_ADDR": where.address,
        "MASTER_PORT": where.port,
    }
    return all(os.environ.get(name) == str(value) for name, value in known.items())


def current_rank() -> int:
    """This process's rank; 0 without a process group."""
    return get_rank() if is_initialized() else 0
