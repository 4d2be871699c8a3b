"""A checkpoint when a process is asked to end: SIGTERM and SIGUSR1 of Slurm, Kubernetes and preemption.

Schedulers ask one process, or all at different times, and saving takes all of them at the same step. So at the end of
each step all ask each other whether anyone was asked, on the host, by one number; nothing is done inside the handler
of the signal but to note when it came. Then all save, and wait until the files are whole, background saves as well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ds_hf.engine.comm.mesh import Axis, host_group
from ds_hf.engine.events import Observer
from ds_hf.errors import DsHfError
from ds_hf.log import logger, warn_once

__all__ = ["AgreedEnd", "SignalledCheckpoint"]

_AGENT_S = 30.0  # that torch's agent waits for its processes to end, if nothing else is said


class AgreedEnd:
    """What all processes of an engine know at the end of a step: whether one of them was asked to end.

    Args:
        axis: all of them.
        grace: seconds from the signal to the end, where they are known (``ds_hf.checkpoint.grace``).
    """

    def __init__(self, axis: Axis, grace: float | None) -> None:
        self.axis = axis
        self.grace, self._grace_is = _period(grace)
        self._group = host_group(axis) if axis.world_size > 1 else None
        self._last: float | None = None
        self._longest = 0.0  # step

    def seconds(self, since: float | None) -> float | None:
        """Seconds since the first signal that any process got, the same on all, or None. All call it.

        Args:
            since: ``time.monotonic()`` of this process's first signal.
        """
        now = time.monotonic()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        mine = -1.0 if since is None else now - since
        if self.axis.world_size > 1:
            told = torch.tensor([mine, self._longest], dtype=torch.float64)
            with self.axis.log("all-reduce (max)", "whether a process was asked to end", told):
                dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
            mine, self._longest = told.tolist()
        self._last = time.monotonic()
        return None if mine < 0 else mine

    def forewarn(self, saving: float | None, patience: float = 0.0) -> None:
        """Warn once if a step and a save take longer than the grace period.

        Args:
            saving: seconds that the last save took, if there was one. patience: seconds before anything is done.
        """
        if self.grace is None or saving is None or self._longest + saving + patience <= self.grace:
            return
        need = self._longest + saving + patience
        warn_once(
            f"a checkpoint upon a signal would not be whole in time: a step takes {self._longest:.1f} s, saving took "
            f"{saving:.1f} s, and {self._grace_is} is {self.grace:g} s\n  fix: have the signal sent {1.5 * need:.0f} s "
            "before the end, and give TORCH_ELASTIC_SHUTDOWN_TIMEOUT as many to torchrun; or save to a faster place",
            about="grace",
        )

    def told(self, path: Path, elapsed: float, name: str) -> None:
        """Say when the checkpoint was whole, ``elapsed`` seconds after the signal."""
        if self.axis.rank:
            return
        text = f"{name}: the checkpoint {path} is whole, {elapsed:.1f} s after the signal"
        if self.grace is not None and elapsed > self.grace:
            logger.warning(
                "%s, and %s is %g s: have the signal sent %.0f s before the end",
                text, self._grace_is, self.grace, 1.5 * elapsed,
            )  # fmt: skip
        else:
            logger.warning("%s", text)


def _period(grace: float | None) -> tuple[float | None, str]:
    """The shorter of what the configuration and torch's agent say, and the name of it."""
    name = "ds_hf.checkpoint.grace"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return grace, name
    try:
        agent = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _AGENT_S))
    except ValueError:
        return grace, name
    if grace is not None and grace <= agent:
        return grace, name
    return agent, "what the agent waits for (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"


class SignalledCheckpoint(Observer):
    """Saves an engine when a signal has come, for loops of their own; ``engine.checkpoint_on_signal`` has one.

    Raises:
        DsHfError: this is not the main thread, or there is no such signal.
    """

    def __init__(self, engine: Any, signals: Sequence[str]) -> None:
        self.engine = engine
        self.since: float | None = None
        self.name = ""
        self._asked_at = -1  # global step
        self._ended = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise DsHfError("signals come to the main thread: call checkpoint_on_signal there")
        numbers = [signal.Signals[name] for name in signals if name in signal.Signals.__members__]
        if not numbers or len(numbers) < len(signals):
            raise DsHfError(f"there are no signals {list(signals)}\n  fix: names such as SIGTERM and SIGUSR1")
        self.end = AgreedEnd(engine.mesh.world, engine.settings.ds_hf.checkpoint.grace)
        for number in numbers:
            self._before[int(number)] = signal.signal(number, self._note)
        engine.events.add(self)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.since is None:
            self.since, self.name = time.monotonic(), signal.Signals(number).name

    def __call__(self, save_dir: str | Path, tag: str | None, client_state: Any) -> bool:
        """Whether training is to end: a signal has come to some process, and the checkpoint is whole. All call it after
        each ``engine.step()``; between the steps of an accumulation nothing happens."""
        engine = self.engine
        if self._ended or engine.global_steps == self._asked_at:
            return self._ended
        self._asked_at = engine.global_steps
        began = time.monotonic()
        elapsed = self.end.seconds(self.since)
        if elapsed is None:
            times = engine.checkpoint_writer.times
            self.end.forewarn(None if times is None else times.written)
            return False
        state = client_state() if callable(client_state) else client_state
        engine.save_checkpoint(save_dir, tag, client_state=state)
        engine.wait_for_checkpoint()
        name = self.name or "a signal to another process"
        place = Path(save_dir) / (f"global_step{engine.global_steps}" if tag is None else tag)
        self.end.told(place, elapsed + time.monotonic() - began, name)
        self._ended = True
        return True

    def close(self) -> None:
        """Give the signals back."""
        for number, before in self._before.items():
            if before is not None:
                signal.signal(number, before)
        self._before = {}
