"""What an ``mpu`` or a mesh says about parallelism that the engine does not have.

An ``mpu`` is an object (or a module) with functions such as Megatron's: the group of processes over which data is
parallel, and the sizes of the others. Model states are divided over the data-parallel axis alone, so with any other
size above 1 each part of the model would train and be saved apart from the rest; that is refused before anything is
built.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ds_hf.errors import ConfigError

__all__ = ["check_mesh_param", "check_mpu"]

# What the interfaces in use have: Megatron-LM's old and new names, DeepSpeed's pipeline grid, Ulysses. An object that
# answers by ``__getattr__`` does not list them; what else it lists is found by its form.
_SIZES = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
    "get_expert_model_parallel_world_size",
)
_FORM = re.compile(r"get_(?!(?:\w+_)?data_)\w+_parallel_world_size")
_INSTEAD = (
    "Let every process be data-parallel (no mpu=, or one whose other sizes are 1): ZeRO stage 3 divides the model over "
    "all of them. Where the model has to be parallel, install DeepSpeed itself"
)


def check_mpu(mpu: Any) -> None:
    """Refuse an ``mpu`` with a model-parallel (tensor, pipeline, sequence, context, expert) size above 1.

    Raises:
        ConfigError: it has one, with the function that says so; or it cannot tell the data-parallel group.
    """
    for name, size in _sizes(mpu):
        if size > 1:
            kind = name.removeprefix("get_").removesuffix("_world_size").replace("_", " ")
            raise ConfigError(
                f"mpu.{name}() is {size}: {kind} training is not supported yet, and the {size} parts would train and "
                f"be saved apart from each other. {_INSTEAD}",
                "initialize(mpu=...)",
            )
    if not callable(getattr(mpu, "get_data_parallel_group", None)):
        raise ConfigError(
            f"{type(mpu).__name__} has no get_data_parallel_group(), which an mpu needs: leave mpu= out where all "
            "processes are data-parallel",
            "initialize(mpu=...)",
        )


def _sizes(mpu: Any) -> Iterator[tuple[str, int]]:
    listed = [name for name in dir(mpu) if _FORM.fullmatch(name) and name not in _SIZES]
    for name in (*_SIZES, *listed):
        function = getattr(mpu, name, None)
        if not callable(function):
            continue
        try:
            size = function()
        except (AssertionError, TypeError):  # Megatron's for a group that was never made; one that needs arguments
            continue
        if size is None:
            continue
        try:
            yield name, operator.index(size)
        except TypeError:
            raise ConfigError(f"mpu.{name}() gives {size!r:.60}, not a number", "initialize(mpu=...)") from None


def check_mesh_param(mesh_param: Sequence[int], world_size: int) -> None:
    """Refuse a mesh (data-parallel size, sequence-parallel size) in which not all processes are data-parallel.

    Raises:
        ConfigError: with the size that is not supported.
    """
    where = "initialize(mesh_param=...)"
    sizes = tuple(mesh_param) if isinstance(mesh_param, Sequence) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{mesh_param!r:.60} is not a mesh: give (data-parallel size, sequence-parallel size)", where)
    if sizes[1] > 1:
        raise ConfigError(
            f"the sequence-parallel size is {sizes[1]}: sequence parallelism is not supported yet. Leave mesh_param= "
            "out, so that every process is data-parallel",
            where,
        )
    if sizes[0] != world_size:
        raise ConfigError(
            f"it has {sizes[0]} data-parallel processes, and {world_size} run: leave mesh_param= out", where
        )
