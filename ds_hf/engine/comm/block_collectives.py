"""Gathers and sums whose messages are blocks of 8 or 4 bits instead of 16-bit values (ZeRO++, arXiv:2306.10209).

What is sent is rounded once a hop; sums are taken in fp32, in the order of the ranks. Values and results have the
shapes of ``collectives``: ``full`` is ``[world_size * n]``, ``shard`` is ``[n]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.ops.blocks import BlockFormat

__all__ = ["BlockSums", "Feedback", "all_gather_blocks", "spread_blocks"]

_NOTHING = -(2**31)  # the bits of -0.0, which no block of values has as its scale


def all_gather_blocks(full: Tensor, shard: Tensor, axis: Axis, form: BlockFormat, what: str = "") -> None:
    """Fill ``full`` (``[numel]``, of the dtype of the shards) with every rank's ``shard`` as blocks hold it, this
    rank's own too: all see the same values."""
    ranks = axis.world_size
    everyone = form.empty(ranks, shard.numel(), shard.device)
    collectives.all_gather(everyone.view(-1), form.write(shard.view(1, -1)).view(-1), axis, what)
    form.read(everyone, full.view(ranks, -1))


def spread_blocks(second: Tensor, shard: Tensor, axis: Axis, inner: Axis, form: BlockFormat, what: str = "") -> None:
    """``collectives.spread`` of what blocks hold of the flat shards, which keep their dtype."""
    parts = axis.world_size // inner.world_size
    received = form.empty(parts, shard.numel(), shard.device)
    collectives.spread(received.view(-1), form.write(shard.view(1, -1)).view(-1), axis, inner, what)
    form.read(received, second.view(parts, -1))


@dataclass(frozen=True)
class Feedback:
    """What rounding has lost is added to the next gradient (LoCo, arXiv:2407.04480; ``zeropp_loco_param``).

    Attributes:
        beta: share of the old error in the average of errors that is kept.
        reset: sums after which the error is forgotten, as in DeepSpeed.
    """

    beta: float = 0.8
    reset: int = 1024


class BlockSums:
    """Sums of the gradients of one buffer over ``axis``, each rank's shard of it: in one hop, or first among neighbours
    and then between groups of them, so that between hosts travels a host's sum (qgZ).

    Args:
        near: neighbours on the axis, and the ranks with the same place among theirs; ``None`` for one hop.
        feedback: keeps 16 bits an element of the gradient more.
    """

    def __init__(
        self,
        axis: Axis,
        form: BlockFormat,
        near: tuple[Axis, Axis] | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        self._axis, self._form, self._near, self._feedback = axis, form, near, feedback
        self._errors: dict[int, Tensor] = {}  # of each hop, shaped as what it sends
        self._sums = 0

    def reduce_scatter(self, full: Tensor, *, factor: float, what: str = "", nothing: bool = False) -> Tensor:
        """``factor`` times the sum over the axis, ``[n]`` in the dtype of ``full``. Collective.

        Args:
            nothing: ``full`` is negative zeros, for there is nothing here. So is the sum where that is so on all ranks.
        """
        if self._feedback is not None and self._sums == self._feedback.reset:
            self._errors.clear()
            self._sums = 0
        self._sums += 1
        rows = full.view(self._axis.world_size, -1)
        result = full.new_empty(rows.shape[1])
        if self._near is None:
            received = self._exchange(self._write(0, rows, nothing), self._axis, what)
            self._form.read(received, result.view(1, -1), factor=factor)
            return result.fill_(-0.0) if nothing and _are_nothing(received) else result
        inner, outer = self._near
        hosts, places = outer.world_size, inner.world_size
        # A rank's shard has its place among neighbours; the first hop brings together what belongs to each place.
        sent = self._write(0, rows, nothing).view(hosts, places, -1).transpose(0, 1).contiguous()
        received = self._exchange(sent, inner, what).transpose(0, 1).contiguous()
        sums = torch.empty(hosts, rows.shape[1], dtype=torch.float32, device=full.device)
        self._form.read(received.view(hosts * places, -1), sums)
        nothing = nothing and _are_nothing(received)
        received = self._exchange(self._write(1, sums, nothing), outer, what)
        self._form.read(received, result.view(1, -1), factor=factor)
        return result.fill_(-0.0) if nothing and _are_nothing(received) else result

    def _write(self, hop: int, rows: Tensor, nothing: bool) -> Tensor:
        if nothing:  # what is owed stays so
            blocks = self._form.write(torch.zeros_like(rows))
            blocks.view(torch.int32)[:, -1] = _NOTHING
            return blocks
        if self._feedback is None:
            return self._form.write(rows)
        if hop not in self._errors:
            self._errors[hop] = torch.zeros_like(rows, dtype=torch.bfloat16)
        return self._form.write(rows, self._errors[hop], beta=self._feedback.beta)

    @staticmethod
    def _exchange(sent: Tensor, axis: Axis, what: str) -> Tensor:
        received = torch.empty_like(sent)
        collectives.all_to_all(received, sent, axis, what)
        return received

    @property
    def has_feedback(self) -> bool:
        """Whether what rounding loses is kept."""
        return self._feedback is not None

    def share_errors(self) -> None:
        """Let all ranks owe the same, the mean of what they owe, so that a rank's shard of it is enough to keep.
        Collective."""
        if 0 not in self._errors:
            return
        total = self._errors[0].float()
        if self._near is not None:
            inner, outer = self._near
            # What the second hop has lost is of sums that belong to this rank's place among neighbours.
            total.view(outer.world_size, inner.world_size, -1)[:, inner.rank] += self._errors[1]
            self._errors[1].zero_()
        collectives.all_reduce_sum(total, self._axis, "what rounding of gradients has lost").div_(len(total))
        self._errors[0].copy_(total)

    def kept_errors(self) -> dict[str, Any]:
        """After ``share_errors``: sums since the errors were forgotten, and this rank's shard of them, ``[n]`` bf16, or
        ``None`` before the first sum."""
        errors = self._errors.get(0)
        return {"sums": self._sums, "errors": None if errors is None else errors[self._axis.rank].cpu()}

    def take_errors(self, kept: dict[str, Any], device: torch.device) -> None:
        """Go on from ``kept_errors`` of all ranks. Collective."""
        self.forget_errors()
        self._sums = kept["sums"]
        shard = kept["errors"]
        if shard is not None:
            ranks, n = self._axis.world_size, shard.numel()
            self._errors[0] = torch.empty(ranks, n, dtype=torch.bfloat16, device=device)
            what = "what rounding of gradients has lost"
            collectives.all_gather(self._errors[0].view(-1), shard.to(device), self._axis, what)

    def forget_errors(self) -> None:
        """They are of gradients of other weights."""
        self._errors.clear()
        self._sums = 0

    @property
    def nbytes(self) -> int:
        """Bytes of feedback held now."""
        return sum(error.nbytes for error in self._errors.values())


def _are_nothing(received: Tensor) -> bool:
    return bool((received.view(torch.int32)[..., -1] == _NOTHING).all())
