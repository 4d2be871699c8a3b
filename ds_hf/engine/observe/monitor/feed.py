"""What an engine tells its monitors of each optimizer step, under DeepSpeed's names.

- ``Train/Samples/train_loss``: the mean of the step's micro-batches on this rank, as ``backward`` was given them: their
  sum after the division by the accumulation steps, fp32. Left out where the engine never saw the loss, which is so for
  a ``loss.backward()`` without ``engine.scale``.
- ``Train/Samples/lr``: of the first parameter group, after the schedule advanced (or did not: the step was skipped).
- ``Train/Samples/loss_scale``: with fp16, after the scaler took note of the step.

All with ``engine.global_samples`` after the step. The step is never waited for: the loss is copied to the host beside
the computation. Where the host learns only later whether the step was applied (bf16 and fp32 on a GPU), its row is
written then: at the next step, when it is asked for, when a checkpoint is saved, in ``destroy``, or when Python exits.
"""

from __future__ import annotations

import atexit
import weakref
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ds_hf.config.types import Config
from ds_hf.engine.events import Observer
from ds_hf.engine.observe.monitor.late import LateCopy, later
from ds_hf.engine.observe.monitor.master import wait_at_exit
from ds_hf.engine.optim.sharded import ShardedOptimizer

__all__ = ["Feed", "attach"]


class MonitoredEngine(Protocol):
    """The engine as its feed sees it."""

    optimizer: ShardedOptimizer | None
    global_steps: int
    global_samples: int
    settings: Config
    monitor: Any

    def settle_step(self) -> None:
        """Find out what became of the last step."""


class Feed(Observer):
    """Writes the events of ``engine`` to what is its monitor at that time, and closes the one that it opened."""

    def __init__(self, engine: MonitoredEngine) -> None:
        self.engine, self._opened = engine, engine.monitor
        self._sum: tuple[int, Tensor] | None = None  # of the step that is being accumulated, and its number from 0
        self._losses: dict[int, Any] = {}  # by the same number; a LateCopy is under way
        self._at_exit = partial(_settle_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def on_loss(self, loss: Tensor, factor: float = 1.0) -> None:
        """Add to the step's sum, and have the host be told of it."""
        step = self.engine.global_steps
        value = loss.detach().float() * factor  # a copy: the Trainer multiplies losses in place
        if self._sum is not None and self._sum[0] == step:
            value = self._sum[1] + value
        self._sum = (step, value)
        self._losses[step] = later(value)

    def on_outcome(self) -> None:
        """Write the last step's events."""
        engine = self.engine
        loss = self._losses.pop(engine.global_steps - 1, None)
        for step in [step for step in self._losses if step != engine.global_steps]:
            del self._losses[step]  # of steps that were never made: a checkpoint was loaded
        assert engine.optimizer is not None
        values = {"train_loss": loss.item() if isinstance(loss, LateCopy) else loss}
        values["lr"] = engine.optimizer.param_groups[0]["lr"]
        values["loss_scale"] = engine.optimizer.loss_scaler.scale if engine.settings.fp16.enabled else None
        x = engine.global_samples
        engine.monitor.write_events([(f"Train/Samples/{key}", v, x) for key, v in values.items() if v is not None])

    def close(self) -> None:
        """Write the last step's events, waiting for it if need be."""
        atexit.unregister(self._at_exit)
        self.engine.settle_step()
        self._opened.close()


def _settle_at_exit(reference: weakref.ref[Feed]) -> None:
    """Write the last step. The master, which was there first, closes after that."""
    feed = reference()
    if feed is None or feed.engine.optimizer is None:
        return
    optimizer = feed.engine.optimizer
    if wait_at_exit(lambda: optimizer.outcome_known):
        feed.engine.settle_step()


def attach(engine: Any) -> None:
    """Write what ``engine`` does to its monitor."""
    engine.events.add(Feed(engine))
