"""The first batch is compared over the tensor axis: processes that share layers have to compute with the same samples.

A loader that takes them for data-parallel gives each its own, and training goes on without an error, on sums of
activations of different samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.zero.unit import tensors_in
from ds_hf.errors import DsHfError
from ds_hf.log import logger

__all__ = ["attach", "compare_first_batch"]

# DeepSpeed's words, which its users look for.
_MESSAGE = "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."
_MODULUS = (1 << 61) - 1
_CHUNK = 1 << 22  # bytes


def attach(engine: Any) -> None:
    """Compare the first batch of ``engine``."""
    compare_first_batch(engine.module, engine.mesh)


def compare_first_batch(model: nn.Module, mesh: Mesh) -> RemovableHandle:
    """Compare what the first call of ``model`` is given over the tensor axis; then the hook removes itself.

    The call raises ``DsHfError`` on all processes of the axis if anything differs; the log says what.
    """
    axis = mesh.axis("tensor")

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        found = {f"argument {index}": value for index, value in enumerate(args)} | dict(kwargs)
        sums = {f"{name}, {tuple(t.shape)}": _checksum(t) for name, v in found.items() for t in tensors_in(v)}
        device = next((t.device for v in found.values() for t in tensors_in(v)), torch.device("cpu"))
        total = 0
        for name, value in sums.items():
            total = (total * 1_000_003 + value + len(name)) % _MODULUS
        mine = torch.tensor([total, -total], device=device)
        most = collectives.all_reduce_max(mine, axis, "a checksum of the first batch")
        if int(most[0]) != -int(most[1]):
            every: list[Any] = [None] * axis.world_size
            dist.all_gather_object(every, sums, group=axis.group)
            raise _difference([axis.global_rank(rank) for rank in range(axis.world_size)], every, mesh.shape.data)

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)
    return handle


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(tensor.detach().contiguous().reshape(-1).view(torch.uint8), _CHUNK):
        places = torch.arange(1, part.numel() + 1, device=part.device) % 65_521
        total = total * 31 + ((part.to(torch.int64) + 1) * (places + 1)).sum()
    return int(total) % _MODULUS


def _difference(ranks: list[int], every: list[dict[str, int]], data: int) -> DsHfError:
    here = f"{ranks[0]} to {ranks[-1]}"
    first = every[0]
    odd = sorted({name for each in every for name in {**first, **each} if each.get(name) != first.get(name)})
    detail = (
        f"ranks {here} share layers and were given different {'; '.join(odd[:4])}. Their loader has to divide samples "
        f"among {data} and not among all processes: sampler rank = rank // {len(ranks)}, num_replicas = {data}. "
        "initialize(training_data=...), the Trainer and accelerate do that where the file has "
        "tensor_parallel.autotp_size"
    )
    logger.error("%s", detail)
    error = DsHfError(_MESSAGE)
    error.__notes__ = [detail]  # type: ignore[attr-defined]  # what add_note() of Python 3.11 does
    return error
