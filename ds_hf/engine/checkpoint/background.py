"""Writing a checkpoint while training goes on.

Order: the main thread copies the rank's part to host memory (``HostCopy``) and goes on; a thread writes it. The threads
meet through the store of the process group, never by collectives: each leaves its report there, rank 0 completes the
checkpoint and leaves the verdict, which all threads wait for.

Invariants
- At most one write is under way; ``busy`` is the same on all ranks, since it changes only where all of them meet.
- A write that failed is raised once, on every rank at the same call: a step boundary, ``wait`` or ``close``.
- The thread is no daemon: the interpreter does not end before the files are whole.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.checkpoint.files import TensorEntry, in_file_order
from ds_hf.checkpoint.reports import RankReport
from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.contents import Part, write_part
from ds_hf.engine.comm.mesh import Axis, host_group
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["BackgroundWriter", "HostCopy", "SaveTimes", "WriteJob"]

PATIENCE_S = 1800.0  # how long rank 0 waits for a rank that writes longer than itself, and the others for rank 0
FAREWELL_S = 5.0  # how long rank 0 waits for the others to read the verdict, before it may end and the store with it


@dataclass
class SaveTimes:
    """What a save cost: seconds that training was blocked, seconds until all was durable, bytes of all ranks."""

    blocked: float
    written: float
    nbytes: int

    def __str__(self) -> str:
        size, speed = self.nbytes / 1e9, self.nbytes / max(self.written, 1e-9) / 1e9
        return f"{size:.3f} GB, blocked {self.blocked:.3f} s, written in {self.written:.3f} s, {speed:.2f} GB/s"


@dataclass
class WriteJob:
    """One write.

    Attributes:
        finish: rank 0: makes the checkpoint of all ranks' reports visible.
        began: when ``save_checkpoint`` was called.
    """

    part: Part
    staged: Path
    target: Path
    finish: Callable[[list[RankReport]], None]
    began: float
    times: SaveTimes


class HostCopy:
    """Host memory for one rank's part, page-locked where there is a GPU, kept from save to save."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def take(self, part: Part) -> None:
        """Copy every tensor of ``part`` and let its entries be the copies."""
        ordered = in_file_order(part.entries)
        memory = self._room(sum(entry.nbytes for _, entry in ordered))
        low = 0
        for key, entry in ordered:
            flat = memory[low : low + entry.nbytes].view(entry.dtype)
            entry.source.fill(flat)
            part.entries[key] = TensorEntry.of(flat.view(entry.shape), entry.stretches)
            low += entry.nbytes
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _room(self, nbytes: int) -> Tensor:
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = None  # free the old one first
            self.memory = _host_memory(nbytes)
        return self.memory


def _host_memory(nbytes: int) -> Tensor:
    if torch.cuda.is_available():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # a limit on locked memory: slower copies, nothing worse
            logger.warning("no page-locked memory for checkpoints (%s): copying takes longer", error)
    return torch.empty(nbytes, dtype=torch.uint8)


class BackgroundWriter:
    """The writer of one engine; costs nothing until the first asynchronous save.

    Attributes:
        busy: a checkpoint is being written; until ``wait`` has returned it may be lost, and the one before it is the
            last that is whole.
        completed: checkpoints that this writer wrote and that are known to be on disk.
        times: of the latest save that is complete, synchronous ones too; of those in the background on rank 0 alone.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.busy = False
        self.completed = 0
        self.times: SaveTimes | None = None
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._failure: str | None = None
        self._asked: tuple[Any, Tensor] | None = None
        self._group: Any = None
        self._hooked: list[Any] | None = None

    # -- the main thread ------------------------------------------------------------------------------------------

    def take(self, part: Part) -> None:
        """Copy what is to be written; nothing else may be under way."""
        assert not self.busy
        self._copy.take(part)

    def start(self, job: WriteJob, step_hooks: list[Any]) -> None:
        """Write in the background, and look at the end of each step whether that is over. All ranks call it."""
        if self._hooked is not step_hooks:
            self._hooked = step_hooks
            step_hooks.append(self.at_boundary)
        store = None if self.axis.log.store is None else _clone(self.axis.log.store)
        if self.axis.world_size > 1 and self._group is None:
            self._group = host_group(self.axis)
        self._done.clear()
        self._failure = None
        self.busy = True
        self._thread = threading.Thread(target=self._run, args=(job, store), name="ds_hf checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: then now
            self._thread = None
            self._run(job, store)

    def at_boundary(self, _engine: Any) -> None:
        """Raise what went wrong in the background, once all ranks' threads are done.

        The ranks ask each other at one boundary and read the answer at the next: no rank waits for another.
        """
        if not self.busy:
            return
        if self.axis.world_size == 1:
            if self._done.is_set():
                self._end()
            return
        if self._asked is not None:
            running, failed = self._answer()
            if not running:
                self._end("it failed on another rank" if failed else None)
                return
        flags = torch.tensor([not self._done.is_set(), self._failure is not None], dtype=torch.int32)
        with self.axis.log("all-reduce (max)", "whether a checkpoint is written", flags):
            self._asked = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True), flags

    def wait(self) -> None:
        """Return when what is being written is whole on disk and has its name, synced. All ranks call it.

        Without a write under way it returns at once.

        Raises:
            CheckpointError: it failed, on whatever rank; the checkpoint before it is untouched.
        """
        if not self.busy:
            return
        if self._asked is not None:
            self._answer()
        self._join()
        failures = collect(self.axis, self._failure)
        self._end(next((failure for failure in failures if failure is not None), None))

    def close(self) -> None:
        """Wait for the write under way and free the copy; the other ranks need not come.

        Raises:
            CheckpointError: the write failed.
        """
        busy, self._asked = self.busy, None
        try:
            if busy:
                self._join()
                self._end()
        finally:
            self._copy = HostCopy()

    def _answer(self) -> tuple[bool, bool]:
        assert self._asked is not None
        work, flags = self._asked
        self._asked = None
        work.wait()
        running, failed = flags.tolist()
        return bool(running), bool(failed)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _end(self, elsewhere: str | None = None) -> None:
        self._join()
        self.busy = False
        failure, self._failure = self._failure or elsewhere, None
        if failure is not None:
            raise CheckpointError(f"a checkpoint that was written in the background is lost: {failure}")
        self.completed += 1

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self, job: WriteJob, store: Any) -> None:
        report: RankReport | None = None
        try:
            try:
                report = write_part(job.staged, job.part)
                failure = None
            except Exception as error:  # everything: the other ranks wait for a word
                failure = _text(error)
            self._failure = self._meet(job, store, report, failure)
        except Exception as error:  # the store: a rank is gone
            self._failure = f"saving {job.target}: the ranks lost each other ({_text(error)})"
        finally:
            job.part.entries.clear()
            self._done.set()
            if self._failure is not None:
                logger.error("%s", self._failure)

    def _meet(self, job: WriteJob, store: Any, report: RankReport | None, failure: str | None) -> str | None:
        """What all ranks' writing came to: ``None``, or what went wrong."""
        rank, size = self.axis.rank, self.axis.world_size
        key = f"checkpoint/{job.staged.name}"
        own = json.dumps({"failure": failure, "report": None if report is None else asdict(report)})
        if rank:
            store.set(f"{key}/{rank}", own)
            verdict = json.loads(_get(store, f"{key}/verdict"))
            store.set(f"{key}/read/{rank}", "")
            return None if verdict is None else str(verdict)
        parts = [json.loads(own), *(json.loads(_get(store, f"{key}/{other}")) for other in range(1, size))]
        verdict = self._judge(job, parts)
        if size > 1:
            store.set(f"{key}/verdict", json.dumps(verdict))
            _farewell(store, [f"{key}/read/{other}" for other in range(1, size)])
            for name in [f"{key}/verdict", *(f"{key}/{o}" for o in range(1, size))]:
                store.delete_key(name)
        return verdict

    def _judge(self, job: WriteJob, parts: list[dict[str, Any]]) -> str | None:
        """Rank 0: complete the checkpoint, or clear it away."""
        for rank, part in enumerate(parts):
            if part["failure"] is not None:
                shutil.rmtree(job.staged, ignore_errors=True)
                return f"saving {job.target} failed on rank {rank}: {part['failure']}"
        try:
            job.finish([RankReport(**part["report"]) for part in parts])
        except Exception as error:
            shutil.rmtree(job.staged, ignore_errors=True)
            return f"saving {job.target} failed: {_text(error)}"
        job.times.written = time.perf_counter() - job.began
        self.times = job.times
        logger.info("saved %s in the background: %s", job.target, job.times)
        return None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _clone(store: Any) -> Any:
    """A connection of the thread's own: a wait on a shared one would hold up the others."""
    return store.clone()


def _get(store: Any, key: str) -> str:
    """The value of ``key``, once it has been set.

    Raises:
        CheckpointError: no rank did, for ``PATIENCE_S`` seconds.
    """
    deadline, pause = time.monotonic() + PATIENCE_S, 0.001
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CheckpointError(f"a rank said nothing of its part for {PATIENCE_S:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    text: str = store.get(key).decode()
    return text


def _farewell(store: Any, keys: list[str]) -> None:
    deadline = time.monotonic() + FAREWELL_S
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.002)
    for key in keys:
        store.delete_key(key)
