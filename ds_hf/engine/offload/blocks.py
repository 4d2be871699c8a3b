"""What one flat buffer keeps, as one stretch of bytes that can lie in host memory, on the device or in a file.

A block has planes: its values (a shard, masters, or the low bits of those) and, of an optimizer, from the first step
on one plane for each moment, each ``[numel]`` and aligned to pages. Values, the optimizer's cuts of them and moments
stay the same tensor objects wherever the bytes are; ``attach`` points them there. At rest in a file they have their
shapes and no values: reading gives NaN, writing is an error of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.engine.offload.memory import round_up

__all__ = ["Block", "BlockCut"]

_VALUES = ""


class BlockCut(Protocol):
    """A stretch of the values that an optimizer takes for a parameter (``optim.segments.Segment``)."""

    start: int
    param: nn.Parameter
    low: Tensor | None  # the values, where ``param`` is the high half of the master weights


class Block:
    """Values of one buffer and their moments.

    Args:
        values: flat; the caller keeps this very tensor.
        name: for errors and files.

    Attributes:
        memory: uint8, where the planes lie now; ``None`` at rest, or while they are tensors of their own.
    """

    def __init__(self, values: Tensor, name: str) -> None:
        self.values = values
        self.name = name
        self.memory: Tensor | None = None
        self._cuts: Sequence[BlockCut] = ()
        self._state: MutableMapping[Any, dict[str, Any]] = {}
        self._laid_out: list[tuple[str, torch.dtype]] = []

    def bind(self, cuts: Sequence[BlockCut], state: MutableMapping[Any, dict[str, Any]]) -> None:
        """The optimizer has cut the values into ``cuts`` and keeps moments in ``state``."""
        self._cuts, self._state = cuts, state
        if self._laid_out:
            self.attach(self.memory)

    def _planes(self) -> list[tuple[str, torch.dtype]]:
        """Names and dtypes, the values first, moments as the segments have them now."""
        found = {_VALUES: self.values.dtype}
        for cut in self._cuts:
            for key, value in self._state.get(cut.param, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape == cut.param.shape:
                    found.setdefault(key, value.dtype)
        return list(found.items())

    def _tensors(self, plane: str) -> Iterator[tuple[int, Tensor]]:
        """First element, tensor."""
        if plane == _VALUES:
            yield 0, self.values
        for cut in self._cuts:
            values = cut.param if cut.low is None else cut.low
            value = values if plane == _VALUES else self._state.get(cut.param, {}).get(plane)
            if value is not None:
                yield cut.start, value

    def _nbytes_of(self, dtype: torch.dtype) -> int:
        return round_up(self.values.numel() * dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes that there are now."""
        return sum(self._nbytes_of(dtype) for _, dtype in self._planes())

    @property
    def nbytes_at_rest(self) -> int:
        """Bytes of the planes as they were laid out last."""
        return sum(self._nbytes_of(dtype) for _, dtype in self._laid_out)

    @property
    def in_memory(self) -> bool:
        """Every plane lies in ``memory``: false once an update, or a checkpoint that was loaded, has made moments."""
        return self.memory is not None and self._planes() == self._laid_out and self._all_in(self.memory)

    @property
    def writes(self) -> list[int]:
        """Counts what torch wrote to the tensors in place, for the engine or for users."""
        return [tensor._version for plane, _ in self._laid_out for _, tensor in self._tensors(plane)]

    def _all_in(self, memory: Tensor) -> bool:
        for plane, flat in self._cut(memory):
            for start, tensor in self._tensors(plane):
                if tensor.numel() and tensor.data_ptr() != flat.data_ptr() + start * flat.element_size():
                    return False
        return True

    def _cut(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The planes of ``memory``, flat."""
        start = 0
        for plane, dtype in self._laid_out:
            yield plane, memory[start : start + self.values.numel() * dtype.itemsize].view(dtype)
            start += self._nbytes_of(dtype)

    @torch.no_grad()
    def attach(self, memory: Tensor | None) -> None:
        """Point everything at ``memory``, which holds the planes as they were last laid out; ``None``: at rest."""
        self.memory = memory
        for plane, flat in self._cut(memory) if memory is not None else self._nothing():
            for start, tensor in self._tensors(plane):
                tensor.data = flat[start : start + tensor.numel()].view(tensor.shape)

    def _nothing(self) -> Iterator[tuple[str, Tensor]]:
        for plane, dtype in self._laid_out:
            yield plane, torch.full((1,), float("nan"), dtype=dtype).expand(self.values.numel())

    @torch.no_grad()
    def adopt(self, memory: Tensor) -> None:
        """Lay all planes out in ``memory``, with the values that their tensors have now.

        ``memory`` may be where some of them lie already: planes are only ever added behind the others.
        """
        planes = self._planes()
        values = {plane: [(start, t.data) for start, t in self._tensors(plane)] for plane, _ in planes}
        self._laid_out = planes
        for plane, flat in self._cut(memory):
            for start, value in values[plane]:
                place = flat[start : start + value.numel()]
                if value.numel() and value.data_ptr() != place.data_ptr():
                    place.copy_(value.reshape(-1))
        self.attach(memory)
