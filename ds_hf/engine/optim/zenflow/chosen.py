"""The chosen elements of one shard: master weights and moments of their own, which the device updates in each step.

Masters are exact copies of the host's, and go back there; moments and the counter of steps begin with the choice, for
the host's are those of means over several steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.optim.adam import adam_update
from ds_hf.engine.optim.base import advance
from ds_hf.engine.optim.segments import Segment

__all__ = ["Chosen", "ChosenJob"]


@dataclass(eq=False)
class _Cut:
    """What of a segment is chosen: see ``offload.blocks.BlockCut``."""

    start: int
    param: nn.Parameter
    segment: Segment
    low: Tensor | None = None


class Chosen:
    """Of one buffer.

    Args:
        mask: which columns they are, see ``Columns``.
        positions: ascending, in the shard, on the device that updates.
        master: of the shard, on the host.

    Attributes:
        block: masters and moments, ``[positions]`` each.
        last: the parameters as they were updated last, on the device.
        stale: the host's masters were written to since.
    """

    def __init__(self, mask: Tensor, positions: Tensor, segments: Sequence[Segment], master: Tensor, name: str) -> None:
        self.mask, self.positions = mask, positions
        self.last: Tensor | None = None
        self.block = Block(master.index_select(0, positions.cpu()).to(positions.device), name)
        self.stale = False
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.cuts: list[_Cut] = []
        for first, param, segment in self._parts(segments):
            self.cuts.append(_Cut(first, param, segment))
            made: dict[str, Any] = {key: torch.zeros_like(param.data) for key in ("exp_avg", "exp_avg_sq")}
            self.state[param] = {**made, "step": torch.zeros((), dtype=torch.float32, device=positions.device)}
        self.block.bind(self.cuts, self.state)

    def _parts(self, segments: Sequence[Segment]) -> Iterator[tuple[int, nn.Parameter, Segment]]:
        """Of each segment that has chosen elements: the first of them, its masters, and itself."""
        there = self.positions.cpu()
        for segment in segments:
            first, last = torch.searchsorted(
                there, torch.tensor([segment.start, segment.end], dtype=there.dtype)
            ).tolist()
            if first < last:
                yield first, nn.Parameter(self.block.values[first:last], requires_grad=True), segment

    def cut(self, segments: Sequence[Segment]) -> None:
        """Follow the segments, which were cut further since; moments and counters do. They are where they rest."""
        if {id(cut.segment) for cut in self.cuts} <= {id(segment) for segment in segments}:
            return
        before, self.cuts = self.cuts, []
        states, self.state = self.state, defaultdict(dict)
        for first, param, segment in self._parts(segments):
            old = next(cut for cut in reversed(before) if cut.start <= first)
            inside = slice(first - old.start, first - old.start + param.numel())
            self.cuts.append(_Cut(first, param, segment))
            self.state[param] = {k: v[inside] if v.dim() else v.clone() for k, v in states[old.param].items()}
        self.block.bind(self.cuts, self.state)

    def to_host(self, master: Tensor) -> None:
        """Write the masters where they are on the host, which then has them all."""
        values = self.block.values.to(master.device)
        master.index_copy_(0, self.positions.to(device=master.device, dtype=torch.int64), values)

    def from_host(self, master: Tensor) -> None:
        """Take the host's, which were written to."""
        self.block.values.copy_(master.index_select(0, self.positions.to(master.device)))
        self.stale = False

    def write(self, owned: Tensor) -> None:
        """Give the parameters in ``owned``, the shard, the values that they were given last."""
        if self.last is not None and not self.stale:
            owned[self.positions.to(owned.device)] = self.last.to(owned.device)


class ChosenJob:
    """One update of chosen elements, see ``store.Job``.

    Args:
        inner: whose rule it is.
        groups: its parameter groups as they are now.
        grad: of the chosen elements.
        scale_and_skip: on the device that updates.
    """

    idle = False

    def __init__(
        self,
        chosen: Chosen,
        inner: Optimizer,
        groups: Sequence[dict[str, Any]],
        grad: Tensor,
        scale_and_skip: Tensor | None,
    ) -> None:
        self.grads: list[Tensor | None] = [grad]
        self._chosen, self._inner, self._groups, self._scale_and_skip = chosen, inner, groups, scale_and_skip

    def __call__(self, outs: Sequence[Tensor | None]) -> None:
        """As there; ``outs``: where the parameters go, ``[positions]``."""
        (grad,), (out,) = self.grads, outs
        assert grad is not None
        assert out is not None
        for index, group in enumerate(self._groups):
            cuts = [cut for cut in self._chosen.cuts if cut.segment.group == index and cut.segment.active]
            places = [slice(cut.start, cut.start + cut.param.numel()) for cut in cuts]
            states = [self._chosen.state[cut.param] for cut in cuts]
            advance(states, self._scale_and_skip)
            if cuts:
                params = [cut.param.data for cut in cuts]
                grads, copies = [grad[place] for place in places], [out[place] for place in places]
                decoupled = getattr(self._inner, "adam_w_mode", group.get("decoupled_weight_decay"))
                adam_update(group, params, grads, copies, states, self._scale_and_skip, decoupled=bool(decoupled))
        for cut in self._chosen.cuts:
            if not cut.segment.active:
                out[cut.start : cut.start + cut.param.numel()].copy_(cut.param.data)
