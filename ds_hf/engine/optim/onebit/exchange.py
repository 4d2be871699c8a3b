"""The mean of tensors over processes in one bit each way, with error feedback (1-bit Adam, arXiv:2102.02888).

Two phases: each process sends each other its part in blocks of one bit, averages what it gets, and sends that mean to
all, in blocks again. What a process's own rounding loses, of its values (*worker error*) and of its part of the mean
(*server error*), is added the next time. Bytes of a process: ``2 (N - 1) / N x n / 8``, and a 128th more for scales; an
all-reduce in bf16 sends 16 times as many.

All memory is kept between steps. What one mean after another passes through, 4 bytes a value, serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.ops.blocks import BlockFormat

__all__ = ["FORM", "Kept", "OneBitExchange", "kept_nbytes", "scratch_nbytes"]

FORM = BlockFormat(1, 4096)
_ALIGNED = 64  # elements: parts of processes begin at whole words of packed signs


@dataclass(frozen=True)
class Kept:
    """What is kept for the means of one key: ``ranks`` parts, which are padded to whole words.

    Attributes:
        numel: values of a mean.
        worker_errors: fp32 ``[ranks, part]``; server_error: fp32 ``[1, part]``, of this process's part.
        sent, received: uint8 ``[ranks, bytes of a part]``.
        under_way: the collective of this key.
    """

    numel: int
    worker_errors: Tensor
    server_error: Tensor
    sent: Tensor
    received: Tensor
    under_way: CommStream

    @property
    def worker_error(self) -> Tensor:
        """``[numel]``, without the padding."""
        return self.worker_errors.view(-1)[: self.numel]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(each.nbytes for each in (self.worker_errors, self.server_error, self.sent, self.received))


class OneBitExchange:
    """Means over ``axis``, which ``None`` makes those of one process."""

    def __init__(self, axis: Axis | None) -> None:
        self.axis = axis
        self._kept: dict[Hashable, Kept] = {}
        self._used: set[Hashable] = set()  # since their errors were brought together
        self._scratch: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def ranks(self) -> int:
        """Processes that take part."""
        return 1 if self.axis is None else self.axis.world_size

    def values(self, numel: int, device: torch.device) -> Tensor:
        """fp32 ``[numel]`` for what is to be averaged, until another mean wants it."""
        return self._memory("values", self.ranks * self._part(numel), device)[:numel]

    def kept(self, key: Hashable, numel: int, device: torch.device) -> Kept:
        """What belongs to the means of ``key``; new, with no errors, where there was nothing of that size."""
        kept = self._kept.get(key)
        if kept is None or kept.numel != numel or kept.sent.device != device:
            part = self._part(numel)
            kept = self._kept[key] = Kept(
                numel,
                torch.zeros(self.ranks, part, dtype=torch.float32, device=device),
                torch.zeros(1, part, dtype=torch.float32, device=device),
                FORM.empty(self.ranks, part, device),
                FORM.empty(self.ranks, part, device),
                CommStream(under_way_nbytes=math.inf),  # what is on its way has memory of its own
            )
        return kept

    def mean(self, key: Hashable, numel: int, device: torch.device, what: str = "") -> Generator[None, None, Tensor]:
        """Average what lies in ``values(numel, device)``: the result lies there again.

        Yields twice, when a collective is on its way: other means may go on until then, if all processes take them in
        one order. Collective.
        """
        values = self.values(numel, device)
        if self.axis is None or self.axis.world_size == 1:
            return values
        kept, ranks, part = self.kept(key, numel, device), self.axis.world_size, self._part(numel)
        self._used.add(key)
        padded = self._memory("values", ranks * part, device).view(ranks, part)
        for tensor in (padded, kept.worker_errors):
            tensor.view(-1)[numel:].zero_()
        FORM.write(padded, kept.worker_errors, out=kept.sent)
        collectives.all_to_all(kept.received, kept.sent, self.axis, what, comm_stream=kept.under_way)
        yield
        kept.under_way.join()
        mine = FORM.read(kept.received, self._memory("mean", part, device).view(1, part), factor=1 / ranks)
        own = FORM.write(mine, kept.server_error, out=kept.sent[self.axis.rank : self.axis.rank + 1])
        collectives.all_gather(kept.sent.view(-1), own.view(-1), self.axis, what, kept.under_way)
        yield
        kept.under_way.join()
        FORM.read(kept.sent, padded)
        return values

    def owed(self, key: Hashable, numel: int, device: torch.device) -> None:
        """Make the worker error what is still owed to the sum of all means, the same on all processes. There are no
        server errors any more: any number of processes can keep it. Collective."""
        if self.axis is None or key not in self._used:
            return
        self._used.discard(key)
        kept, ranks = self.kept(key, numel, device), self.axis.world_size
        kept.worker_errors[self.axis.rank].add_(kept.server_error[0], alpha=ranks)
        kept.server_error.zero_()
        collectives.all_reduce_sum(kept.worker_errors, self.axis, "errors of the 1-bit exchange").div_(ranks)

    def drop(self, key: Hashable) -> None:
        """What ``key`` owes is not wanted any more."""
        if key in self._kept:
            self._kept[key].worker_errors.zero_()
            self._kept[key].server_error.zero_()
        self._used.discard(key)

    def forget(self) -> None:
        """Errors are of values that are gone."""
        self._kept.clear()
        self._used.clear()

    def _memory(self, name: str, numel: int, device: torch.device) -> Tensor:
        memory = self._scratch.get((name, device))
        if memory is None or memory.numel() < numel:
            memory = self._scratch[name, device] = torch.empty(numel, dtype=torch.float32, device=device)
        return memory[:numel]

    def _part(self, n: int) -> int:
        return _part_of(n, self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between steps."""
        return sum(kept.nbytes for kept in self._kept.values()) + sum(each.nbytes for each in self._scratch.values())


def kept_nbytes(numel: int, ranks: int) -> int:
    """What ``Kept`` of means of ``numel`` values takes: errors of the values and of a part, and two messages."""
    part = _part_of(numel, ranks)
    return 4 * (ranks + 1) * part + 2 * ranks * FORM.nbytes(part)


def scratch_nbytes(numel: int, ranks: int) -> int:
    """What an ``OneBitExchange`` takes besides, whose largest means are of ``numel`` values."""
    return 4 * (ranks + 1) * _part_of(numel, ranks)


def _part_of(n: int, ranks: int) -> int:
    """Values of a process's part of ``n``."""
    return -(-n // (ranks * _ALIGNED)) * _ALIGNED
