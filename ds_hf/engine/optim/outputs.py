"""The way of 16-bit parameters from an update on the CPU to where the shard is: the device, host memory or a file."""

from __future__ import annotations

from torch import Tensor

from ds_hf.engine.offload.link import Arrival, Link
from ds_hf.engine.offload.memory import host_empty
from ds_hf.engine.optim.store import written_beside
from ds_hf.engine.zero.gradient_home import HostHome
from ds_hf.engine.zero.gradients import GradientBuffer

__all__ = ["Outputs"]


class Outputs:
    """Host memory that updates write to, and the copies from there.

    Args:
        pinned: see ``host_empty``.
        at_once: parameters in host memory are written by the update itself; else by ``finish``, because somebody may
            read them meanwhile.
    """

    def __init__(self, link: Link, *, pinned: bool, at_once: bool = True) -> None:
        self._link, self._pinned, self._at_once = link, pinned, at_once
        self._own: dict[GradientBuffer, Tensor] = {}
        self._written: dict[GradientBuffer, tuple[Tensor, Tensor]] = {}

    def begin(self, gradient: GradientBuffer, master: Tensor) -> Tensor | None:
        """Where the unit's update writes parameters; ``None`` where the master is the parameters."""
        buffer = gradient.buffer
        shard = buffer.full if gradient.policy.whole else buffer.shard
        if self._at_once and buffer.stays and shard.device.type == "cpu":
            return written_beside(buffer.owned(whole=gradient.policy.whole, fresh=True), master)
        between = self._between(gradient, shard)
        self._written[gradient] = between, shard
        return between

    def _between(self, gradient: GradientBuffer, shard: Tensor) -> Tensor:
        home = gradient.home
        spare = home.spare(shard.numel(), shard.dtype) if isinstance(home, HostHome) else None
        if spare is not None:
            return spare
        if gradient not in self._own:
            self._own[gradient] = host_empty(shard.numel(), shard.dtype, pinned=self._pinned)
        return self._own[gradient]

    def finish(self, gradient: GradientBuffer, unused: Arrival | None = None) -> None:
        """The update is over: what the current stream gets from now on may use the parameters.

        Args:
            unused: when the parameters' old values are of no use any more, see ``Link.up``.
        """
        if gradient in self._written:
            between, shard = self._written.pop(gradient)
            buffer = gradient.buffer
            if buffer.aliased and buffer.region is None:
                owned = shard
            else:  # it may have been somewhere else meanwhile, or others may still read it
                owned = buffer.owned(whole=gradient.policy.whole, fresh=True)
            self._link.up(owned, between, unused=unused).on_stream()

    def drop(self, gradient: GradientBuffer) -> None:
        """The unit is not updated on the CPU any more."""
        self._own.pop(gradient, None)

    def close(self) -> None:
        """Give the memory back."""
        self._own.clear()
        self._written.clear()
