"""Optimizer states in files: unit i + 1 is read and unit i - 1 written while the CPU updates unit i.

Gradients wait in host memory, which is where the update wants them. A unit's master and moments are one stretch of its
file, so that each step reads and writes each unit once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.optim.store import HostSettings, MakeJob
from ds_hf.engine.optim.streamed_updates import Outputs
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.storage import GradientStorage

__all__ = ["FileStore"]


class FileStore:
    """States on NVMe.

    Args:
        device: where the model computes.
        pool: with slots for at least three units.
    """

    splits: str | None = "its optimizer states are on NVMe and come to memory unit by unit"
    takes_split_masters = False
    delays = False
    skips = False

    def __init__(self, device: torch.device, settings: HostSettings, pool: SwapPool) -> None:
        self.device = torch.device("cpu")
        self._settings, self._pool = settings, pool
        self._link, self._worker = HostLink(device), Worker()
        self._outputs = Outputs(self._link, pinned=settings.pinned)
        self._blocks: dict[FlatBuffer, Block] = {}

    def place(self, buffer: FlatBuffer, owned: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        block = Block(values.to(device=self.device, dtype=dtype, copy=True), f"{buffer.labels.name}.states")
        self._blocks[buffer] = block
        self._pool.add(block)
        return block.values

    def gradient_storage(self, buffer: FlatBuffer) -> GradientStorage:
        return self._settings.new_gradient_storage(self._link, self._worker)

    def bind(self, inner: Optimizer, segments: Mapping[GradientBuffer, Sequence[Segment]]) -> Sequence[FlatBuffer]:
        for gradient, cut in segments.items():
            self._blocks[gradient.buffer].bind(cut, inner.state)
        return ()

    def place_low_bits(self, buffer: FlatBuffer) -> Tensor:
        raise AssertionError("the CPU updates whole masters")

    def stream(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> Iterator[Sequence[GradientBuffer]]:
        blocks = [self._blocks[gradient.buffer] for gradient in gradients]
        for index, (gradient, block) in enumerate(zip(gradients, blocks, strict=True)):
            job = make([gradient])
            if job.idle:
                yield [gradient]
                continue
            self._pool.visit(block, write=True)
            out = self._outputs.begin(gradient, block.values)
            update = self._worker.submit(job, [out])
            # after the last unit the first: the next step then finds it. It may have to wait for a write: not before
            self._pool.prefetch(blocks[(index + 1) % len(blocks)])
            update.result()
            self._pool.flush(block)
            self._outputs.finish(gradient)
            yield [gradient]

    def visit(self, buffer: FlatBuffer, *, write: bool = True) -> None:
        self._pool.visit(self._blocks[buffer], write=write)

    def wait_for_states(self) -> None:
        """They are read and written unit by unit, by ``visit``."""

    def kept_apart(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def settle(self, *, last: bool = False) -> Iterator[Sequence[GradientBuffer]]:
        return iter(())

    def close(self) -> None:
        self._worker.close()
        self._link.close()
        self._pool.close()
        self._outputs.close()
        self._blocks.clear()
