"""What a model that its author has divided says about its parameters (``mpu=``): which are cut, and where.

Megatron-LM and those who follow it mark a parameter of which each process of the model-parallel group holds a part with
``tensor_model_parallel`` or ``model_parallel``; ``partition_dim`` and ``partition_stride`` say where the part belongs.
All other parameters are taken for whole and equal on all processes of the group, which the author's layers see to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis, Mesh
from ds_hf.engine.zero.buffer import home_of, logical_shape
from ds_hf.engine.zero.cut import even_cut, is_cut, is_marked, set_cut
from ds_hf.errors import CheckpointError, ConfigError
from ds_hf.log import warn_once

__all__ = ["mark_cuts", "refuse_parts", "warn_of_differences"]

_SHOWN = 8  # names in a message
_CHUNK = 1 << 22  # elements


def mark_cuts(model: nn.Module, mesh: Mesh) -> None:
    """Give each marked parameter its ``Cut``, if it says where it is cut.

    Raises:
        ConfigError: a mark that cannot be, or values that were shared with other parts of the model already.
    """
    if mesh.shape.tensor == 1 or not mesh.is_given:
        return
    tensor, faults = mesh.axis("tensor"), []
    for name, param in model.named_parameters():
        home = home_of(param)
        if home is not None and home.buffer.axis.world_size > mesh.replicas.world_size:
            raise ConfigError(
                f"{name} was built under zero.Init on {home.buffer.axis.world_size} processes, but its replicas are "
                f"the {mesh.replicas.world_size} of the data-parallel group: every part of the model has the values of "
                "the first. Give zero.Init the same mpu=",
                "initialize(mpu=...)",
            )
        if getattr(param, "sequence_parallel", False) and not is_marked(param):
            faults.append(
                f"{name} is marked sequence_parallel: its gradient would have to be summed over the model-parallel "
                "group, which ds_hf leaves to the model"
            )
        dim = getattr(param, "partition_dim", None)
        if not is_marked(param) or dim is None or dim < 0:  # -1 is Megatron's for unset
            continue
        try:
            stride = getattr(param, "partition_stride", 1)
            set_cut(param, even_cut(logical_shape(param), dim, tensor.rank, tensor.world_size, stride))
        except (TypeError, ValueError) as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise ConfigError("; ".join(faults[:_SHOWN]), "initialize(mpu=...)")


def warn_of_differences(model: nn.Module, mesh: Mesh) -> None:
    """Name the parameters without a mark that differ over the model-parallel group: forgotten marks, as a rule.

    Collective; compares checksums of what this rank holds, which is of the same elements in the whole group.

    Raises:
        ConfigError: the parts of the model have other numbers of parameters.
    """
    if mesh.shape.tensor == 1 or not mesh.is_given:
        return
    axis, named = mesh.axis("tensor"), list(model.named_parameters())
    device = next((param.device for _, param in named), torch.device("cpu"))
    count = torch.tensor([len(named)], device=device)
    if _differs(count, axis, "how many parameters there are").any():
        raise ConfigError(
            f"this process has {len(named)} parameters, and others of its model-parallel group have another number: "
            "every part of the model needs the same parameters, in the same order",
            "initialize(mpu=...)",
        )
    sums = torch.stack([_checksum(param, count.device) for _, param in named])
    differing = _differs(sums, axis, "parameters that are not marked as divided").flatten().to(torch.int32)
    collectives.all_reduce_max(differing, mesh.world, "parameters that differ")  # each replica saw its shards
    names = [name for (name, _), differs in zip(named, differing.tolist(), strict=True) if differs]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warn_once(
            f"{', '.join(names[:_SHOWN])}{more} differ over the model-parallel group of the mpu and are not marked as "
            "divided over it. They train apart, and the gradient norm takes them for one: set "
            "param.tensor_model_parallel = True (with partition_dim) on those that are parts, give the others the same "
            "values on all ranks"
        )


def refuse_parts(mesh: Mesh, what: str) -> None:
    """Refuse files of a model of which each process has a part only.

    Raises:
        CheckpointError: the model is divided.
    """
    if mesh.shape.model > 1:
        raise CheckpointError(
            f"{what} does not know models that are divided over model-parallel processes yet ({mesh.shape}): one part "
            "would take the place of all. Save each part by yourself: module.state_dict() under "
            "deepspeed.zero.GatheredParameters, in a file for each model-parallel rank"
        )


def _differs(values: Tensor, axis: Axis, what: str) -> Tensor:
    """Where ``values``, int64, are not the same on all processes of ``axis``."""
    extremes = collectives.all_reduce_max(torch.stack([values, -values]), axis, what)
    return extremes[0] != -extremes[1]


@torch.no_grad()
def _checksum(param: Tensor, device: torch.device) -> Tensor:
    """Of the bits here, ``[1]`` int64; 0 for a cut parameter."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    if is_cut(param):
        return total
    home = home_of(param)
    pieces: Sequence[Tensor] = [param.detach().reshape(-1)]
    if home is not None and home.buffer.sharded:
        shard, rank = home.buffer.shard, home.buffer.axis.rank
        fragments = [f for f in home.buffer.layout.fragments(rank) if f.slot is home.slot]
        pieces = [shard[f.shard_start : f.shard_start + f.numel] for f in fragments]
    for piece in pieces:
        for part in torch.split(piece, _CHUNK):
            ints = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
            weights = torch.arange(1, ints.numel() + 1, device=ints.device)
            total += (ints * weights).sum().to(device)
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
