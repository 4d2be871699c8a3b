"""The groups of processes that share a sequence: ``deepspeed.runtime.sequence_parallel.parallel_state_sp``.

This module is an ``mpu``: ``initialize(mpu=...)`` takes its group over. It is the process's, as DeepSpeed's is, so all
models of a process divide sequences over as many processes.
"""

from __future__ import annotations

import torch.distributed as dist

from ds_hf.engine.comm.mesh import group_of

__all__ = [
    "ensure_sequence_parallel",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
    "is_initialized",
]

_SEQUENCE_PARALLEL_GROUP: dist.ProcessGroup | None = None
_WORLD: dist.ProcessGroup | None = None  # in which it was made: gone with it


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups: processes that share a sequence have consecutive ranks. All processes call it.

    Raises:
        AssertionError: there are such groups already.
        RuntimeError: the size does not divide the processes.
        ValueError: it is less than 2.
    """
    global _SEQUENCE_PARALLEL_GROUP, _WORLD
    assert dist.is_initialized(), "torch.distributed is not initialized: call deepspeed.init_distributed() first"
    assert not is_initialized(), "sequence parallel group is already initialized"
    world_size = dist.get_world_size()
    if world_size < sequence_parallel_size:
        raise RuntimeError(f"world_size ({world_size}) is less than sequence_parallel_size {sequence_parallel_size}")
    if sequence_parallel_size <= 1:
        raise ValueError(f"sequence_parallel_size must be greater than 1, got {sequence_parallel_size}")
    if world_size % sequence_parallel_size:
        sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
        raise RuntimeError(
            f"world_size ({world_size}) is not divisible by sequence_parallel_size {sequence_parallel_size}: "
            f"take {' or '.join(map(str, sizes))}"
        )
    first = range(0, world_size, sequence_parallel_size)
    lists = [list(range(start, start + sequence_parallel_size)) for start in first]
    _SEQUENCE_PARALLEL_GROUP, _WORLD = group_of(lists), dist.group.WORLD


def ensure_sequence_parallel(size: int) -> None:
    """``initialize_sequence_parallel``, unless groups of this size are there.

    Raises:
        RuntimeError: there are groups of another size.
    """
    if not is_initialized():
        initialize_sequence_parallel(size)
    elif (there := get_sequence_parallel_world_size()) != size:
        raise RuntimeError(
            f"sequences are divided over {there} processes here, and are asked to be over {size}: one process can do "
            "one of them; start another process for the other"
        )


def is_initialized() -> bool:
    """Whether there are groups, of the process group that is there now."""
    return _SEQUENCE_PARALLEL_GROUP is not None and dist.is_initialized() and _WORLD is dist.group.WORLD


def _release_sequence_parallel_groups() -> None:
    global _SEQUENCE_PARALLEL_GROUP, _WORLD
    _SEQUENCE_PARALLEL_GROUP = _WORLD = None


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """The processes that share sequences with this one."""
    group = _SEQUENCE_PARALLEL_GROUP if is_initialized() else None
    assert group is not None, "sequence parallel group is not initialized"
    return group


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """All processes: gradients are reduced and states divided over them."""
    group = _WORLD if is_initialized() else None
    assert group is not None, "sequence data parallel group is not initialized"
    return group


def get_sequence_parallel_world_size() -> int:
    return dist.get_world_size(get_sequence_parallel_group())


def get_sequence_data_parallel_world_size() -> int:
    return dist.get_world_size(get_sequence_data_parallel_group())


def get_sequence_parallel_rank() -> int:
    return dist.get_rank(get_sequence_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    return dist.get_rank(get_sequence_data_parallel_group())


# DeepSpeed's aliases: beside data there is one more dimension, whatever it is called.
get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_group = get_sequence_parallel_group
