"""What the optimizer keeps of single buffers: masters, gradients and moments; for checkpoints, DeepSpeed's functions
that read and write them, and for all else that asks beside the step.

Tensors are flat and cover what this rank owns. The first question about a buffer waits for an update of it that still
goes on; another buffer's question may send its states away again. Masters that are split are made whole for
who reads them, and taken apart again by ``write_master``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.ops.split_master import join, write_split
from ds_hf.engine.optim.base import StreamingOptimizer
from ds_hf.engine.optim.loss_scaler import LossScaler
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.optim.stepping import OptimizerPolicy, Stepping
from ds_hf.engine.optim.store import StateStore
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer

__all__ = ["BufferStates"]

_AT_ONCE = 1 << 24  # elements for which copies are made at a time


class BufferStates:
    """Mixed into ``ShardedOptimizer``."""

    if TYPE_CHECKING:
        optimizer: Optimizer
        policy: OptimizerPolicy
        loss_scaler: LossScaler
        masters: dict[FlatBuffer, Tensor]
        low_bits: dict[FlatBuffer, Tensor]
        segments: dict[GradientBuffer, list[Segment]]
        store: StateStore
        versions: dict[FlatBuffer, list[int]]
        _apply: Stepping
        _gradients: dict[FlatBuffer, GradientBuffer]

        @property
        def state(self) -> Any: ...

    @property
    def whole(self) -> bool:
        return self.policy.whole

    def updates(self, buffer: FlatBuffer) -> bool:
        """Whether there are master weights for the buffer."""
        return buffer in self.masters

    def master(self, buffer: FlatBuffer) -> Tensor | None:
        """Master weights over what this rank owns; states of the buffer may be used until another's are asked for.

        Where they are split, made of them: who writes to it gives it to ``write_master``.
        """
        if buffer not in self.masters:
            return None
        self.store.visit(buffer)
        return self.master_part(buffer, 0, self.masters[buffer].numel())

    def master_part(self, buffer: FlatBuffer, start: int, end: int) -> Tensor:
        """Some of the master weights that may be used now."""
        part, low = self.masters[buffer][start:end], self.low_bits.get(buffer)
        return part if low is None else join(part.to(low.device), low[start:end])

    def master_dtype(self, buffer: FlatBuffer) -> torch.dtype:
        """Dtype of the master weights, however they are kept."""
        return torch.float32 if buffer in self.low_bits else self.masters[buffer].dtype

    def states_device(self, buffer: FlatBuffer) -> torch.device:
        """Where the buffer's states are between steps."""
        return self.low_bits.get(buffer, self.masters[buffer]).device

    @torch.no_grad()
    def _split_master(self, buffer: FlatBuffer) -> None:
        """Keep the buffer's masters split from now on."""
        master, owned = self.masters[buffer], buffer.owned(whole=self.policy.whole)
        low = self.store.place_low_bits(buffer)
        write_split(master, owned, low)
        self.masters[buffer], self.low_bits[buffer] = owned, low
        for gradient, segments in self.segments.items():
            for segment in segments if gradient.buffer is buffer else ():
                segment.low = low[segment.start : segment.end].view(segment.shape)
                segment.param.data = owned[segment.start : segment.end].view(segment.shape)

    def join_masters(self) -> None:
        """Keep no masters split any more: they are needed as tensors that can be written to."""
        for gradient, segments in self.segments.items():
            buffer = gradient.buffer
            if buffer in self.low_bits:
                master = self.master(buffer)
                assert master is not None
                owned = buffer.owned(whole=self.policy.whole, write=False)
                self.masters[buffer] = master = self.store.place(buffer, owned, master, torch.float32)
                del self.low_bits[buffer]
                for segment in segments:
                    segment.low = None
                    segment.param.data = master[segment.start : segment.end].view(segment.shape)

    @torch.no_grad()
    def values_changed(self, buffer: FlatBuffer, *, partly: bool = False) -> None:
        """The parameters were written from outside: the masters follow, or ``partly``: those that do not round to what
        their parameters are."""
        self.versions.pop(buffer, None)
        if buffer not in self.masters:
            return
        self.store.visit(buffer)
        master, owned = self.masters[buffer], buffer.owned(whole=self.policy.whole)
        if buffer in self.low_bits:
            self.low_bits[buffer].zero_()
        elif owned.data_ptr() != master.data_ptr() and not partly:
            master.copy_(owned)
        elif owned.data_ptr() != master.data_ptr():
            for part, values in zip(torch.split(master, _AT_ONCE), torch.split(owned, _AT_ONCE), strict=True):
                here = values.to(part.device)
                torch.where(part.to(here.dtype) == here, part, here.to(part.dtype), out=part)

    @torch.no_grad()
    def write_master(self, buffer: FlatBuffer, master: Tensor) -> None:
        """``master``, which ``master()`` gave, has new values; ``masters_changed`` follows."""
        if buffer in self.low_bits:
            write_split(master, buffer.owned(whole=self.policy.whole), self.low_bits[buffer])

    @torch.no_grad()
    def masters_changed(self, buffer: FlatBuffer) -> None:
        """The masters were written from outside: the parameters follow. Collective."""
        self.store.visit(buffer)
        self._apply.write_weights({buffer: None})

    def gradient(self, buffer: FlatBuffer) -> Tensor | None:
        """Averaged, unscaled fp32 gradient over what this rank owns; collective while sums are still partial."""
        gradient = self._gradients[buffer]
        shown = gradient.shown
        gradient.take_back()
        gradient.collect()
        if gradient.has_partial:
            gradient.reduce()
        if shown:
            gradient.show()
        owned = gradient.settled()
        if owned is None:
            return None
        return owned.float() / self.loss_scaler.scale

    def shows_gradient(self, buffer: FlatBuffer) -> bool:
        """``.grad`` of the buffer's parameters is theirs in the coming step, with the loss scale."""
        return self._gradients[buffer].shown

    def set_gradient(self, buffer: FlatBuffer, value: Tensor) -> None:
        """Replace the averaged, unscaled gradient over what this rank owns."""
        gradient = self._gradients[buffer]
        shown = gradient.shown
        gradient.take_back()
        gradient.replace(value * self.loss_scaler.scale)
        if shown:
            gradient.show()

    def moments(self) -> list[str]:
        """Names of the tensor states that have one value for each element, e.g. ``exp_avg``."""
        names: dict[str, None] = {}
        for segments in self.segments.values():
            for segment in segments:
                for key, value in self.state.get(segment.param, {}).items():
                    if isinstance(value, Tensor) and value.numel() == segment.param.numel() and value.dim() > 0:
                        names.setdefault(key)
        return list(names)

    @property
    def moment_dtypes(self) -> set[torch.dtype]:
        """Dtypes that moments have, or will have when the first step makes them."""
        made = {v.dtype for s in self.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() > 0}
        return made or set(map(self.moment_dtype, self.masters))

    def moment_dtype(self, buffer: FlatBuffer) -> torch.dtype:
        """Dtype of the buffer's moments on every rank, also on one that has none of them, or before the first step."""
        master = self.master_dtype(buffer)
        wide = isinstance(self.optimizer, StreamingOptimizer) and self.optimizer.fp32_optimizer_states
        narrow = master is torch.bfloat16 and self._apply.update is not None and self.policy.moments is torch.float32
        return torch.promote_types(master, torch.float32) if wide or narrow else master

    def moment(self, buffer: FlatBuffer, key: str) -> Tensor | None:
        """A moment over what this rank owns, flat; ``None`` when no parameter of the buffer has it."""
        self.store.visit(buffer, write=False)
        numel, device = self.masters[buffer].numel(), self.states_device(buffer)
        result = torch.zeros(numel, dtype=self.moment_dtype(buffer), device=device)
        found = False
        for segment in self.segments[self._gradients[buffer]]:
            value = self.state.get(segment.param, {}).get(key)
            if isinstance(value, Tensor) and value.numel() == segment.param.numel():
                result[segment.start : segment.end].copy_(value.reshape(-1))
                found = True
        # A rank may own nothing of this buffer's trainable part: it still takes part in collectives.
        return result if found or (key in self.moments()) else None

    @torch.no_grad()
    def set_moment(
        self, buffer: FlatBuffer, key: str, value: Tensor, *, create: bool = True, take: bool = False
    ) -> None:
        """Write a moment over what this rank owns; makes the state where there is none yet, unless not to ``create``.

        With ``take`` the state may be ``value`` itself: the caller does not need it any more.

        Rules that keep other moments for matrices than for vectors must not get those that are not theirs.
        """
        self.store.visit(buffer)
        device = self.states_device(buffer)
        for segment in self.segments[self._gradients[buffer]]:
            state = self.state[segment.param]
            piece = value[segment.start : segment.end].view(segment.shape)
            if key in state:
                state[key].copy_(piece)
            elif create:
                state[key] = piece.to(device=device, dtype=self.moment_dtype(buffer), copy=not take)

    @property
    def nbytes(self) -> int:
        """Bytes of masters (not counting those that are the parameters themselves) and tensor states."""
        total = 0
        for buffer, master in self.masters.items():
            beside = self.low_bits.get(buffer, master)
            if beside.data_ptr() != buffer.owned(whole=self.policy.whole).data_ptr():
                total += beside.numel() * beside.element_size()
        for state in self.state.values():
            total += sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor) and v.dim() > 0)
        return total

    def _whole_master(self, buffer: FlatBuffer) -> Tensor:
        """The master, or a copy in host memory: put together, all of them would not have room on the device."""
        master = self.master(buffer)
        assert master is not None
        return master.cpu() if buffer in self.low_bits else master

    @contextlib.contextmanager
    def _params_beside_states(self) -> Iterator[None]:
        """torch gives states that it loads the device of their parameters: the device has no room for all at once."""
        away = [s for ss in self.segments.values() for s in ss if s.low is not None and s.low.device != s.param.device]
        values = [segment.param.data for segment in away]
        for segment in away:
            segment.param.data = torch.empty((), dtype=torch.float32).expand(segment.shape)
        try:
            yield
        finally:
            for segment, value in zip(away, values, strict=True):
                segment.param.data = value
