"""How much of the device optimizer states may have, found out after the first steps: ``ds_hf.offload.ratio: auto``.

What is free then, at the peak of a whole step, is taken but for a margin; the least of all ranks counts.
"""

from __future__ import annotations

import torch

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis
from ds_hf.log import logger

__all__ = ["Room"]

_STEPS = 2  # the first makes moments and workspaces, the second has its peak with all of them
_MARGIN = 0.08  # of the device: fragments, longer batches, workspaces of libraries


class Room:
    """Asks the device once.

    Args:
        axis: ranks that must decide alike.
    """

    def __init__(self, device: torch.device, axis: Axis) -> None:
        self._device, self._axis = device, axis
        self._steps = 0

    @property
    def decided(self) -> bool:
        """``nbytes_for_states`` has given its answer."""
        return self._steps >= _STEPS

    def nbytes_for_states(self) -> int | None:
        """Bytes that may move to the device now; ``None`` at every step but one. Collective in that step."""
        self._steps += 1
        if self._steps != _STEPS:
            return None
        mine = torch.tensor([-self._free()], dtype=torch.float64, device=self._device)
        left = max(0, int(-collectives.all_reduce_max(mine, self._axis, "the free memory of devices").item()))
        if self._axis.rank == 0:
            logger.info("offload: %.1f GiB of the device are free for optimizer states", left / 2**30)
        return left

    def _free(self) -> int:
        """Bytes beyond the peak so far, less the margin. Without a CUDA device nothing is gained by moving."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return int(total * (1 - _MARGIN)) - others - torch.cuda.max_memory_allocated(self._device)
