"""What a model that its author has divided says about its parameters (``mpu=``): which are cut, and where.

Megatron-LM and those who follow it mark a parameter of which each process of the model-parallel group holds a part with
``tensor_model_parallel`` or ``model_parallel``; ``partition_dim`` and ``partition_stride`` say where the part belongs.
All other parameters are taken for whole and equal on all processes of the group, which the author's layers see to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.zero.buffer import home_of, logical_shape
from ds_hf.engine.zero.cut import even_cut, is_cut, is_marked, part_of_stack, set_cut
from ds_hf.errors import CheckpointError, ConfigError
from ds_hf.log import warn_once

__all__ = ["check_copies", "mark_cuts", "warn_of_differences"]

_SHOWN = 8  # names in a message
_CHUNK = 1 << 22  # elements
_ROUNDING = 0.01  # of the largest value: copies that rounding alone has moved apart stay well below


def mark_cuts(model: nn.Module, mesh: Mesh) -> None:
    """Give each marked parameter its ``Cut``, if it says where it is cut.

    Raises:
        ConfigError: a mark that cannot be, or values that were shared with other parts of the model already.
    """
    tensor, faults = mesh.axis("tensor"), []
    placeless = []
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
        if not is_marked(param):
            continue
        dim = getattr(param, "partition_dim", None)
        if dim is None or dim < 0:  # -1 is Megatron's for unset
            set_cut(param, part_of_stack(logical_shape(param), tensor.rank, tensor.world_size))
            placeless.append(name)
            continue
        try:
            stride = getattr(param, "partition_stride", 1)
            set_cut(param, even_cut(logical_shape(param), dim, tensor.rank, tensor.world_size, stride))
        except (TypeError, ValueError) as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise ConfigError("; ".join(faults[:_SHOWN]), "initialize(mpu=...)")
    if placeless:
        warn_once(
            f"{_listed(placeless)} {'are' if len(placeless) > 1 else 'is'} marked as divided over the model-parallel "
            "group, and no partition_dim says along which dimension: files hold the parts side by side, as one tensor "
            f"[{tensor.world_size}, ...], which only as many parts load. Set param.partition_dim"
        )


def warn_of_differences(model: nn.Module, mesh: Mesh) -> None:
    """Name the parameters without a mark that differ over the model-parallel group: forgotten marks, as a rule.

    Collective; compares checksums of what this rank holds, which is of the same elements in the whole group.

    Raises:
        ConfigError: the parts of the model have other numbers of parameters, or parameters of other sizes.
    """
    axis, named = mesh.axis("tensor"), list(model.named_parameters())
    device = next((param.device for _, param in named), torch.device("cpu"))
    count = torch.tensor([len(named)], device=device)
    if _differs(count, axis, "how many parameters there are").any():
        raise ConfigError(
            f"this process has {len(named)} parameters, and others of its model-parallel group have another number: "
            "every part of the model needs the same parameters, in the same order",
            "initialize(mpu=...)",
        )
    numels = torch.tensor([logical_shape(param).numel() for _, param in named], device=device)
    uneven = _differs(numels, axis, "the sizes of parameters").tolist()
    if any(uneven):
        names = [name for (name, _), differs in zip(named, uneven, strict=True) if differs]
        raise ConfigError(
            f"{_listed(names)} {'have' if len(names) > 1 else 'has'} another size on other processes of the "
            "model-parallel group: what is divided is divided equally, and the rest is the same on all",
            "initialize(mpu=...)",
        )
    names = _differing(model, mesh)
    if names:
        warn_once(
            f"{_listed(names)} differ over the model-parallel group of the mpu and are not marked as "
            "divided over it. They train apart, and the gradient norm takes them for one: set "
            "param.tensor_model_parallel = True (with partition_dim) on those that are parts, give the others the same "
            "values on all ranks"
        )


def check_copies(model: nn.Module, mesh: Mesh, what: str) -> None:
    """Before files hold one copy of each parameter that is not marked: the others are the same, but for rounding.

    Collective.

    Raises:
        CheckpointError: they are not, on all processes.
    """
    if mesh.shape.tensor == 1 or not mesh.is_given:
        return
    names = _differing(model, mesh)
    far = _far_apart(model, mesh, names) if names else []
    if _on_other_stages(model, mesh, far) or far:
        raise CheckpointError(
            f"{what}: {_listed(far) or 'parameters of another stage'} differ over the model-parallel group and are not "
            "marked as divided over it: files would hold the first part's values alone. Set "
            "param.tensor_model_parallel = True and partition_dim before initialize(); to keep what this run has "
            "learnt, save module.state_dict() under deepspeed.zero.GatheredParameters in a file for each "
            "model-parallel rank"
        )
    if names:
        warn_once(f"{_listed(names)} differ a little over the model-parallel group: files hold the first part's values")


def _on_other_stages(model: nn.Module, mesh: Mesh, far: Sequence[str]) -> bool:
    """Whether a stage of the pipeline has such parameters."""
    if mesh.shape.pipe == 1:
        return False
    count = torch.tensor([len(far)], device=next((param.device for param in model.parameters()), torch.device("cpu")))
    return bool(collectives.all_reduce_max(count, mesh.axis("pipe"), "parameters that differ"))


def _far_apart(model: nn.Module, mesh: Mesh, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that differ by more than rounding. Collective over the stage."""
    device = next(model.parameters()).device
    apart = torch.zeros(len(names), 2, dtype=torch.float32, device=device)  # how far, and how large they are
    for row, name in zip(apart, names, strict=True):
        here = torch.cat(
            [
                torch.zeros(1, dtype=torch.float32, device=row.device),
                *(p.float().to(row.device) for p in _pieces(model.get_parameter(name))),
            ]
        )
        extremes = collectives.all_reduce_max(torch.stack([here, -here]), mesh.axis("tensor"), "parameters that differ")
        row.copy_(torch.stack([extremes.sum(0).max(), extremes.abs().max()]))
    apart = collectives.all_reduce_max(apart, mesh.stage, "parameters that differ")
    return [name for name, (spread, size) in zip(names, apart.tolist(), strict=True) if not spread <= _ROUNDING * size]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _differing(model: nn.Module, mesh: Mesh) -> list[str]:
    """Names of parameters without a mark that differ over the model-parallel group. Collective over the stage."""
    axis, named = mesh.axis("tensor"), list(model.named_parameters())
    device = next((param.device for _, param in named), torch.device("cpu"))
    sums = torch.stack([_checksum(param, device) for _, param in named])
    differing = _differs(sums, axis, "parameters that are not marked as divided").flatten().to(torch.int32)
    collectives.all_reduce_max(differing, mesh.stage, "parameters that differ")  # each replica saw its shards
    return [name for (name, _), differs in zip(named, differing.tolist(), strict=True) if differs]


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
    for piece in _pieces(param):
        for part in torch.split(piece, _CHUNK):
            ints = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
            weights = torch.arange(1, ints.numel() + 1, device=ints.device)
            total += (ints * weights).sum().to(device)
    return total


def _pieces(param: Tensor) -> list[Tensor]:
    """What this process has of a parameter now, flat."""
    home = home_of(param)
    if home is None or not home.buffer.sharded:
        return [param.detach().reshape(-1)]
    shard, rank = home.buffer.owned(whole=False, write=False), home.buffer.axis.rank
    fragments = [f for f in home.buffer.layout.fragments(rank) if f.slot is home.slot]
    return [shard[f.shard_start : f.shard_start + f.numel].detach() for f in fragments]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
