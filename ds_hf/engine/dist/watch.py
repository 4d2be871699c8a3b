"""Hangs get a name: when ranks diverge, the run ends with the first collective that differs and where each rank is.

A thread of each rank wakes up now and then, tells the others through the store of the process group how far the rank
is, and compares. It raises the alarm when

- another rank of the host notes a different collective (``board``; found at once, in the thread that issues it),
- the digests of two ranks differ (also where nothing hangs, because the sizes happened to be the same),
- a collective fails, or a rank ended that others wait for,
- a rank has issued nothing for ``timeout`` seconds, and neither has another that is behind it,
- a rank has issued nothing for ``timeout`` seconds, and one that it waits for has not been heard of for as long: a
  process that is stopped, or in a call that keeps Python's lock, cannot say how long it has been idle.

After an alarm every rank that can leaves its log and its stack in the store. The rank that raised it tells; all end.
Ranks that are equally far are left alone, however long they compute: nothing says that they diverged. The store itself
may be kept by a process that is stopped; a second thread ends the wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ds_hf.engine.dist.log import CollectiveLog
from ds_hf.engine.dist.report import describe
from ds_hf.errors import DivergenceError
from ds_hf.printable import printable

__all__ = ["Watch"]

MAX_INTERVAL_S = 5.0
ANSWER_S = 5.0  # how long the others have to answer an alarm, beyond their interval
LEAD_S = 2.0  # how long the rank that tells ends before the others: a launcher reports the first that ends
# Frames that say nothing to the reader: between the model's own lines, and below the call that led to a collective.
_NOISE = (
    "/torch/nn/modules/module.py",
    "/torch/utils/_contextlib.py",
    "/torch/autograd/",
    "/torch/distributed/",
    "/ds_hf/engine/dist/",
    "/ds_hf/engine/zero/",
)


class Watch:
    """Watches one log.

    Args:
        store: shared by the ranks and by nothing else; a connection of its own.
        timeout: seconds without a collective after which a rank that others are ahead of is said to hang.
    """

    def __init__(self, log: CollectiveLog, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.log, self.store, self.rank, self.world_size = log, store, rank, world_size
        self.timeout = timeout
        self._group = dist.group.WORLD
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._speaks = False  # this rank raised the alarm, outside the thread
        self._alarmed = False
        self._seen, self._since = -1, time.monotonic()
        self._beat = 0  # of this rank; of the others, and for how many seconds it has stood still
        self._heard: dict[int, tuple[int, float]] = {}
        self._now = self._passed = 0.0
        if not faulthandler.is_enabled():
            faulthandler.enable()  # gloo aborts where somebody else's collective meets one of ours: show who that was
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._run, name="ds_hf watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="ds_hf watch of the store", daemon=True).start()

    @property
    def interval(self) -> float:
        return max(0.1, min(MAX_INTERVAL_S, self.timeout / 8))

    # -- called where collectives are issued ----------------------------------------------------------------------

    def diverged(self) -> None:
        """Another rank noted another collective.

        Raises:
            DivergenceError: always.
        """
        self._speaks = True
        raise DivergenceError(self._confer("the ranks of this run issue different collectives"))

    def failed(self, error: RuntimeError) -> None:
        """A collective raised ``error``.

        Raises:
            DivergenceError: from ``error``, unless all ranks are equally far.
        """
        if isinstance(error, torch.OutOfMemoryError | DivergenceError):
            return
        self._speaks = True
        text = ""
        with contextlib.suppress(RuntimeError):  # the store went down with its rank: the error has to do
            text = self._confer(f"a collective failed ({str(error).strip().splitlines()[0]})", only_if_apart=True)
        if text:
            raise DivergenceError(text) from error

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._wake.wait(self.interval):
                if dist.group.WORLD is not self._group:
                    break
                self._tick()
            if dist.group.WORLD is not self._group:
                self._publish(self._farewell(""))  # not heard of any more, and not missed
        except RuntimeError:  # the store is gone, and with it the rank that kept it: nobody to compare with
            pass
        finally:
            self._wake.set()

    def _guard(self) -> None:
        """End the process where the thread waits for a store that does not answer, and nothing else happens either."""
        seen, seconds, before = (-1, -1), 0.0, time.monotonic()
        while not self._wake.wait(self.interval):
            now, state = time.monotonic(), (self._beat, self.log.count)
            seconds = seconds + min(now - before, 2 * self.interval) if state == seen else 0.0
            seen, before = state, now
            alarmed = 3 * (self.interval + ANSWER_S) if self._alarmed else 0.0
            if seconds >= self.timeout + alarmed:
                reason = (
                    f"rank {self.rank} has issued nothing for {seconds:.0f} s, and the store of the process group has "
                    "not answered for as long: the process that keeps it (rank 0, unless the launcher does) is stopped"
                )
                _tell(describe(reason, {self.rank: self._state_in_full()}, self.world_size))
                _exit()

    def _tick(self) -> None:
        count, now = self.log.count, time.monotonic()
        if count != self._seen:
            self._seen, self._since = count, now
        idle = now - self._since
        # No more than a little of it counts: this process may have been stopped itself.
        self._passed, self._now = min(now - self._now, 2 * self.interval), now
        state = {"count": count, "idle": idle, "marks": list(self.log.marks), "digest": self.log.digest}
        self._publish(state | {"beat": self._beat})
        self._beat += 1
        if self._speaks:
            return
        if self.store.check(["alarm"]):
            self._end(None)
        if self.rank:
            other = self._state(0)
            if other and self._differs(count, idle, other):
                self._end("the ranks of this run issue different collectives")
        if idle >= 2 * self.interval:
            self._look_round(count, idle)

    def _differs(self, count: int, idle: float, other: Mapping[str, Any]) -> bool:
        theirs = dict(map(tuple, other["marks"]))
        if any(digest != theirs.get(index, digest) for index, digest in list(self.log.marks)):
            return True
        resting = min(idle, other["idle"]) >= 2 * self.interval  # count and digest belong together
        return bool(resting and count == other["count"] and self.log.digest != other["digest"])

    def _look_round(self, count: int, idle: float) -> None:
        """This rank stands still: whom does it wait for?"""
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            state = self._state(rank) or {"count": 0, "idle": 0.0, "beat": -1}
            silent = self._silent(rank, state)
            inside = self.log.inside and "ended" not in state  # a blocking one, which the other may be in as well
            if state["count"] > count or (state["count"] == count and not inside):
                continue
            waits = f"rank {self.rank} waits for rank {rank}, which"
            if "ended" in state:
                self._end(f"{waits} has ended")
            if min(idle, silent) >= self.timeout:
                why = "it is stopped, or in a call that keeps Python from running"
                self._end(f"{waits} does not answer: nothing was heard of it for {silent:.0f} s ({why})")
            if state["count"] < count and min(idle, state["idle"]) >= self.timeout:
                self._end(f"{waits} has issued nothing for {state['idle']:.0f} s")

    def _silent(self, rank: int, state: Mapping[str, Any]) -> float:
        """Seconds for which ``rank`` has published nothing, as far as this rank has looked."""
        beat, seconds = self._heard.get(rank, (None, 0.0))
        seconds = seconds + self._passed if state.get("beat") == beat else 0.0
        self._heard[rank] = state.get("beat", -1), seconds
        return seconds

    # -- the alarm ------------------------------------------------------------------------------------------------

    def _end(self, reason: str | None) -> None:
        """End this process; with a ``reason``, and if nobody raised the alarm before, tell all about it first."""
        self._alarmed = True
        first = reason is not None and self.store.compare_set("alarm", "", str(self.rank)) == str(self.rank).encode()
        if first and reason is not None:
            _tell(self._confer(reason))
        else:
            self._answer()
            deadline = time.monotonic() + 2 * (self.interval + ANSWER_S)
            with contextlib.suppress(RuntimeError):
                while not self.store.check(["told"]) and time.monotonic() < deadline:
                    time.sleep(0.1)
                time.sleep(LEAD_S)
        _exit()

    def _confer(self, reason: str, *, only_if_apart: bool = False) -> str:
        """Ask all ranks; the report, ``""`` if they turn out to be equally far and that was asked for."""
        self._alarmed = True
        self.store.compare_set("alarm", "", str(self.rank))
        self._answer()
        deadline = time.monotonic() + self.interval + ANSWER_S
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                key = f"answer/{rank}"
                if rank not in answers and self.store.check([key]):
                    answers[rank] = json.loads(self.store.get(key))
            time.sleep(0.05)
        self.store.set("told", "")
        together = len(answers) == self.world_size and len({answer["count"] for answer in answers.values()}) == 1
        return "" if only_if_apart and together else describe(reason, answers, self.world_size)

    def _state_in_full(self) -> dict[str, Any]:
        """What a report tells of this rank."""
        entries = list(self.log.entries)
        return {
            "count": self.log.count,
            "first": self.log.count - len(entries),
            "entries": entries,
            "idle": time.monotonic() - self._since,
            "stack": _stack(self.log.thread),
        }

    def _farewell(self, ended: str) -> dict[str, Any]:
        """The last state that this rank publishes."""
        idle = time.monotonic() - self._since
        return {"count": self.log.count, "idle": idle, "marks": [], "digest": 0, "ended": ended}

    def _answer(self, ended: str | None = None) -> None:
        answer = self._state_in_full()
        if ended is not None:
            answer |= {"ended": ended, "stack": ""}
        self.store.set(f"answer/{self.rank}", json.dumps(answer))

    def _publish(self, state: Mapping[str, Any]) -> None:
        self.store.set(f"state/{self.rank}", json.dumps(state))

    def _state(self, rank: int) -> dict[str, Any] | None:
        key = f"state/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _leave(self) -> None:
        """The process ends: say so."""
        if os.getpid() != self._pid:
            return
        self._wake.set()
        self._thread.join(ANSWER_S)  # the interpreter must not end while the thread is inside the store's C++
        if dist.group.WORLD is not self._group or self._speaks:
            return
        error = getattr(sys, "last_value", None)
        ended = "" if error is None else "".join(traceback.format_exception_only(error)).strip()
        with contextlib.suppress(RuntimeError):
            self._publish(self._farewell(ended))
            self._answer(ended)


def _tell(text: str) -> None:
    sys.stderr.write(printable(f"\nDivergenceError: {text}\n"))
    _record_for_torchrun(text)


def _exit() -> None:
    """The main thread is inside a collective that will not end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _stack(thread: int) -> str:
    """Where the main thread is, and the thread that issued the last collective if that is another one."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    text = _format(frames.get(main or 0))
    if thread != main and thread in frames:
        text += "  in the thread of autograd:\n" + _format(frames[thread])
    return text


def _format(frame: FrameType | None) -> str:
    frames = traceback.extract_stack(frame) if frame else []
    told = [f for f in frames if not any(noise in f.filename for noise in _NOISE)]
    return "".join(traceback.format_list((told or frames)[-60:]))


def _record_for_torchrun(text: str) -> None:
    """Leave the error where torchrun looks for the cause of a failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        info = {"extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": f"DivergenceError: {text}", **info}}, file)
