"""Host memory for activations: stretches of a few large pieces, which are kept from step to step.

Page-locking costs a third of a second a GiB, so memory is asked for once, for all blocks of a forward together, before
the first of them is copied: if the host lacks it, that is an error with a sentence, and not the end of the process some
blocks later. A stretch goes back when its last holder is gone, whatever thread that happens in.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ds_hf.engine.offload.memory import host_empty, require_host_memory, round_up

__all__ = ["Arena", "Stretch"]


class _Piece:
    """One allocation, and which parts of it are free."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = [(0, memory.numel())]  # ordered, never adjacent
        self.returned: deque[tuple[int, int]] = deque()

    @property
    def idle(self) -> bool:
        return self.free == [(0, self.memory.numel())]

    def take(self, nbytes: int) -> Stretch | None:
        """The first free part that is large enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return Stretch(self, start, start + nbytes)
        return None

    def collect(self) -> None:
        """Join what came back to what is free."""
        if not self.returned:
            return
        while self.returned:
            self.free.append(self.returned.popleft())
        joined: list[tuple[int, int]] = []
        for start, end in sorted(self.free):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self.free = joined


class Stretch:
    """A part of an arena's memory, in use for as long as the object lives."""

    def __init__(self, piece: _Piece, start: int, end: int) -> None:
        self._piece, self._bounds = piece, (start, end)

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Its first bytes as ``[numel]`` of ``dtype``."""
        start = self._bounds[0]
        return self._piece.memory[start : start + numel * dtype.itemsize].view(dtype)

    def __del__(self) -> None:
        self._piece.returned.append(self._bounds)  # in one step: the collector may run while the arena is at work


class Arena:
    """Gives out stretches.

    Args:
        pinned: page-lock the memory for a CUDA device.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self._pieces: list[_Piece] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, in use or not."""
        return sum(piece.memory.numel() for piece in self._pieces)

    def take(self, nbytes: int, *, alike: int, what: str) -> Stretch:
        """``nbytes`` of it.

        Args:
            alike: stretches of this size that are about to be taken, this one included: more memory is asked for
                enough of them at once.
            what: for the error, what needs the memory.

        Raises:
            OffloadError: the host has too little.
        """
        nbytes = round_up(nbytes)
        for piece in self._pieces:
            piece.collect()
        for piece in self._pieces:
            stretch = piece.take(nbytes)
            if stretch is not None:
                return stretch
        self._pieces = [piece for piece in self._pieces if not piece.idle]  # too small, all of them
        piece = _Piece(self._allocate(nbytes * alike, what))
        self._pieces.append(piece)
        stretch = piece.take(nbytes)
        assert stretch is not None
        return stretch

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        require_host_memory(nbytes, what)
        return host_empty(nbytes, torch.uint8, pinned=self.pinned)

    def clear(self) -> None:
        """Let go of the memory; what is in use stays until its holders are gone."""
        self._pieces.clear()
