"""States that leave the device for a while, at the user's word (``engine.offload_states``), and come back.

A *parked* storage has its bytes in host memory and none on the device; the tensors over it, views and all, stay the
same objects and must not be used meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ds_hf.engine.offload.memory import host_empty

__all__ = ["Parking"]


class Parking:
    """Storages that are away."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor, torch.device]] = []

    def __bool__(self) -> bool:
        return bool(self._away)

    def park(self, tensors: Iterable[Tensor], *, pinned: bool) -> None:
        """Copy what is under ``tensors`` to host memory and free it; a storage under several of them goes once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or not storage.resizable():
                continue
            copy = host_empty(storage.nbytes(), torch.uint8, pinned=pinned)
            copy.copy_(_bytes(storage, tensor.device))
            storage.resize_(0)
            self._away.append((storage, copy, tensor.device))

    def restore(self, *, non_blocking: bool = False) -> None:
        """Bring everything back, to where it was; copies are enqueued on the current stream."""
        for storage, copy, device in self._away:
            storage.resize_(copy.numel())
            _bytes(storage, device).copy_(copy, non_blocking=non_blocking)
        if non_blocking and self._away and self._away[0][2].type == "cuda":
            torch.cuda.current_stream(self._away[0][2]).synchronize()  # the host copies are freed here
        self._away.clear()


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
