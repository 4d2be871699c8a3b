"""``deepspeed.runtime.comm.compressed``: exchanges in one bit, for scripts that call them themselves.

Here, as in DeepSpeed, one scale is that of the whole tensor; ds_hf's own optimizers have one for each 4096 elements
(``engine/optim/onebit/exchange.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.ops.reference_blocks import packed_numbers, unpacked_numbers

__all__ = ["CompressedBackend"]


class CompressedBackend:
    """Means of tensors in one bit over the data-parallel processes.

    Args:
        mpu: has ``get_data_parallel_group()``; by default all processes take part.
    """

    def __init__(self, mpu: Any = None) -> None:
        self.mpu = mpu
        self.world_group = dist.group.WORLD if mpu is None else mpu.get_data_parallel_group()
        self.size = dist.get_world_size(self.world_group)
        self.rank = dist.get_rank(self.world_group)

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: Any = None
    ) -> Tensor:
        """The mean of ``buffer_m`` over processes, as signs and scales carry it; written into it too. Collective.

        Args:
            buffer_m: fp32, of any shape and at most as many elements as ``worker_error``.
            worker_error: flat, fp32, a multiple of 8 times the number of processes; what rounding loses is added to it.
            server_error: flat, fp32, that many elements divided by the number of processes.
            local_rank: not needed.

        Raises:
            ValueError: the sizes do not belong together.
        """
        numel, padded = buffer_m.numel(), worker_error.numel()
        if padded % (8 * self.size) or server_error.numel() * self.size != padded or numel > padded:
            raise ValueError(
                f"compressed_allreduce: {numel} elements, a worker error of {padded} and a server error of "
                f"{server_error.numel()}: these must be {self.size} x 8 x n >= {numel} and 8 x n"
            )
        values = torch.nn.functional.pad(buffer_m.reshape(-1), (0, padded - numel))
        sent, scale = _signs(values, worker_error)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.world_group)
        mean = _values(received.view(self.size, -1), self._scales(scale)).sum(0).div_(self.size)
        sent, scale = _signs(mean, server_error)
        everyone = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(everyone, sent, group=self.world_group)
        result = _values(torch.stack(everyone), self._scales(scale)).view(-1)[:numel].view(buffer_m.shape)
        return buffer_m.copy_(result)

    def _scales(self, scale: Tensor) -> Tensor:
        scales = [torch.empty_like(scale) for _ in range(self.size)]
        dist.all_gather(scales, scale, group=self.world_group)
        return torch.stack(scales)


def _signs(values: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Packed signs of ``values + error`` and the scale, ``[1]``; what they lose is left in ``error``."""
    values = values + error
    scale = (values.norm() / values.numel() ** 0.5).view(1)
    positive = values >= 0
    error.copy_(values - torch.where(positive, scale, -scale))
    return packed_numbers(positive.to(torch.uint8).view(1, -1), 1).view(-1), scale


def _values(packed: Tensor, scales: Tensor) -> Tensor:
    """fp32 ``[rows, numel]`` of packed signs, ``[rows, numel / 8]``, and scales, ``[rows, 1]``."""
    return unpacked_numbers(packed, 1).float() * scales.view(-1, 1)
