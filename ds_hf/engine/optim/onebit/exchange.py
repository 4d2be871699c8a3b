"""The mean of tensors over processes in one bit each way, with error feedback (1-bit Adam, arXiv:2102.02888).

Two phases: each process sends each other its part in blocks of one bit, averages what it gets, and sends that mean to
all, in blocks again. What a process's own rounding loses, of its values (*worker error*) and of its part of the mean
(*server error*), is added the next time. Bytes of a process: ``2 (N - 1) / N x n / 8``, and a 64th more for scales; an
all-reduce in bf16 sends 16 times as many.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.ops.blocks import BlockFormat

__all__ = ["Exchange"]

_FORM = BlockFormat(1, 2048)
_ALIGNED = 64  # elements: parts of processes begin at whole words of packed signs


class Exchange:
    """Means over ``axis``, which ``None`` makes those of one process.

    Server errors are kept here, by ``key``: the same tensors under the same key each time.
    """

    def __init__(self, axis: Axis | None) -> None:
        self.axis = axis
        self._server_errors: dict[Hashable, Tensor] = {}
        self._used: set[Hashable] = set()  # since their errors were brought together

    @property
    def ranks(self) -> int:
        """Processes that take part."""
        return 1 if self.axis is None else self.axis.world_size

    def mean(self, key: Hashable, values: Tensor, worker_error: Tensor, what: str = "") -> Tensor:
        """The mean of ``values``, ``[n]`` fp32; ``worker_error``, ``[n]``, is read and written. Collective."""
        if self.axis is None or self.axis.world_size == 1:
            return values
        ranks, n = self.axis.world_size, values.numel()
        part = self._part(n)
        padded, error = _padded(values, ranks * part), _padded(worker_error, ranks * part)
        sent = _FORM.write(padded.view(ranks, part), error.view(ranks, part))
        if error is not worker_error:
            worker_error.copy_(error[:n])
        received = torch.empty_like(sent)
        collectives.all_to_all(received, sent, self.axis, what)
        mine = _FORM.read(received, values.new_empty(1, part), factor=1 / ranks)
        if key not in self._server_errors:
            self._server_errors[key] = torch.zeros_like(mine)
        sent = _FORM.write(mine, self._server_errors[key])
        everyone = _FORM.empty(ranks, part, values.device)
        collectives.all_gather(everyone.view(-1), sent.view(-1), self.axis, what)
        self._used.add(key)
        return _FORM.read(everyone, padded.view(ranks, part)).view(-1)[:n]

    def owed(self, key: Hashable, worker_error: Tensor) -> Tensor:
        """What is still owed to the sum of all means, ``[n]``, the same on all processes. Each takes it as its worker
        error, and there are no server errors any more: any number of processes can keep it. Collective."""
        if self.axis is None or key not in self._used:
            return worker_error
        self._used.discard(key)
        ranks, n = self.axis.world_size, worker_error.numel()
        part = self._part(n)
        total = torch.zeros(ranks * part, dtype=worker_error.dtype, device=worker_error.device)
        total[:n] = worker_error
        server = self._server_errors.pop(key)
        total[self.axis.rank * part :][:part].add_(server.view(-1), alpha=ranks)
        return collectives.all_reduce_sum(total, self.axis, "errors of the 1-bit exchange")[:n].div_(ranks)

    def drop(self, key: Hashable) -> None:
        """What ``key`` owes is not wanted any more."""
        self._server_errors.pop(key, None)
        self._used.discard(key)

    def forget(self) -> None:
        """Server errors are of values that are gone."""
        self._server_errors.clear()
        self._used.clear()

    def _part(self, n: int) -> int:
        return -(-n // (self.ranks * _ALIGNED)) * _ALIGNED

    @property
    def nbytes(self) -> int:
        """Bytes of server errors."""
        return sum(error.nbytes for error in self._server_errors.values())


def _padded(values: Tensor, numel: int) -> Tensor:
    return values if values.numel() == numel else torch.nn.functional.pad(values, (0, numel - values.numel()))
