"""Fixed pieces of work that say how fast the machine is at the moment: always the same, whatever model is measured.

A matrix product ("compute"), a copy that leaves the caches ("copy"), with several processes an all-reduce
("communication"), and with an accelerator a loop of Python ("host"). A reading is the mean time of a few beats of each,
on the process that was slowest. Invariants: every rank makes the same beats in the same order; nothing random is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_hf.engine.comm import collectives

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["SHARE", "Probe"]

SHARE = 0.04  # of the time that is measured, as far as LEAST allows
LEAST, MOST = 2, 24  # beats of a reading
WIDTH, NBYTES, SENT = 256, 8 << 20, 1 << 20  # of the product, the copy and the sum: some 5 ms together on a CPU's core
GPU_WIDTH, GPU_NBYTES, GPU_TIMES = 2048, 8 << 20, 16  # the same on an accelerator, so often for a beat
LOOPS = 20_000  # of Python


class Probe:
    """The probes of one engine. All ranks call ``read`` together."""

    def __init__(self, engine: CoreEngine) -> None:
        self.engine, self.device = engine, engine.device
        self.spent = 0.0  # seconds in all
        self._beat = 0.0  # seconds of one of each

    def read(self, measured: float = 0.0, least: int = LEAST) -> dict[str, float]:
        """Kind of probe -> mean seconds of a beat.

        Args:
            measured: seconds of the visit before, the same on every rank; a small share of it is taken.
            least: beats.
        """
        start = time.perf_counter()
        beats = least if not self._beat else min(MOST, max(least, int(SHARE * measured / self._beat)))
        works = self._works()
        for work in works.values():
            work()  # memory is touched, libraries are awake, and the ranks are where the others are
        self._settle()
        found = torch.tensor([self._mean(work, beats) for work in works.values()], dtype=torch.float64)
        found = collectives.all_reduce_max(
            found.to(self.device), self.engine.mesh.world, "how fast the machine is"
        ).cpu()
        self._beat = float(found.sum())
        self.spent += time.perf_counter() - start
        return dict(zip(works, found.tolist(), strict=True))

    def _mean(self, work: Callable[[], object], beats: int) -> float:
        """The mean and not the median: on a shared core most beats are undisturbed, and some wait for long."""
        start = time.perf_counter()
        for _ in range(beats):
            work()
        self._settle()
        return (time.perf_counter() - start) / beats

    def _works(self) -> dict[str, Callable[[], object]]:
        """What is timed. The tensors live as long as a reading, so that no peak of a step has them."""
        cuda = self.device.type == "cuda"
        width, nbytes, times = (GPU_WIDTH, GPU_NBYTES, GPU_TIMES) if cuda else (WIDTH, NBYTES, 1)
        dtype = torch.bfloat16 if cuda else torch.float32
        left = torch.full((width, width), 1 / width, dtype=dtype, device=self.device)
        product = torch.empty_like(left)
        source = torch.ones(nbytes // 4, device=self.device)
        target = torch.empty_like(source)
        sent = torch.zeros((nbytes if cuda else SENT) // 4, device=self.device)

        def multiply() -> None:
            for _ in range(times):
                torch.mm(left, left, out=product)

        def copy() -> None:
            for _ in range(times):
                target.copy_(source)

        works: dict[str, Callable[[], object]] = {"compute": multiply, "copy": copy}
        axis = self.engine.mesh.world
        if axis.world_size > 1:
            works["communication"] = lambda: dist.all_reduce(sent, group=axis.group)
        if cuda:
            works["host"] = _loop
        return works

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _loop() -> int:
    total = 0
    for index in range(LOOPS):
        total += index
    return total
