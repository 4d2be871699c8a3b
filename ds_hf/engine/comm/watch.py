"""Hangs get a name: when ranks diverge, the run ends with the first collective that differs and where each rank is.

There is one watch in a process, over the logs of all its axes: a rank that others wait for in the axis "data" may
itself wait for a third in the axis "tensor". A thread of each rank wakes up now and then, tells the others through the
store of the process group how far the rank is on each axis, and compares. It raises the alarm when

- another rank of the host notes a different collective (``log.Board``; found at once, in the thread that issues it),
- the digests of two ranks differ (also where nothing hangs, because the sizes happened to be the same),
- a collective fails, or a rank ended that others wait for,
- a rank has issued nothing for ``timeout`` seconds, on any axis, and neither has another that is behind it on one,
- a rank has issued nothing for ``timeout`` seconds, and one that it waits for has not been heard of for as long: a
  process that is stopped, or in a call that keeps Python's lock, cannot say how long it has been idle.

After an alarm every rank that can leaves its logs and its stack in the store. The rank that raised it tells; all end.
Ranks that are equally far are left alone, however long they compute: nothing says that they diverged. The store itself
may be kept by a process that is stopped; a second thread ends the wait for it.

Each rank reads a few states whatever the number of ranks: on each axis that of the first rank, for the digests, and
when it stands still that of the rank after it. Somewhere on the ring one that is ahead comes before one that is behind.
A rank that has ended or does not answer looks at no other, so the one before it looks past it, too.
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
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ds_hf.engine.comm.log import CollectiveLog
from ds_hf.engine.comm.report import describe, first_difference, ranks_text
from ds_hf.errors import DivergenceError
from ds_hf.printable import printable

__all__ = ["Watch"]

MAX_INTERVAL_S = 5.0
ANSWER_S = 5.0  # how long the others have to answer an alarm, beyond their interval
LEAD_S = 2.0  # how long the rank that tells ends before the others: a launcher reports the first that ends
# Frames that say nothing to the reader: between the model's own lines, and below the call that led to a collective.
_NOISE = (
    "/ds_hf/engine/comm/watch.py",
    "/torch/nn/modules/module.py",
    "/torch/utils/_contextlib.py",
    "/torch/autograd/",
    "/torch/distributed/",
    "/contextlib.py",
    "/ds_hf/engine/comm/",
    "/ds_hf/engine/zero/",
)


class Watch:
    """Watches the logs of one process.

    Args:
        store: shared by the ranks and by nothing else; a connection of its own.
        rank: this process; ``ranks``: all that train together. Global ranks, as everywhere here.
        timeout: seconds without a collective after which a rank that others are ahead of is said to hang.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self.store, self.rank, self.ranks = store, rank, tuple(ranks)
        self.timeout = timeout
        self.logs: list[CollectiveLog] = []
        self._group = dist.group.WORLD
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._speaks = False  # this rank raised the alarm, outside the thread
        self._alarmed = False
        self._since: dict[str, tuple[int, float]] = {}  # by log: its count, and when the thread saw it first
        self._beat = 0  # of this rank; of the others, and for how many seconds it has stood still
        self._heard: dict[int, tuple[int, float]] = {}
        self._now = self._passed = 0.0

    def start(self) -> None:
        """From now on."""
        if not faulthandler.is_enabled():
            faulthandler.enable()  # gloo aborts where a collective of a script meets one of ours: show whose that was
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._run, name="ds_hf watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="ds_hf watch of the store", daemon=True).start()

    def take_in(self, log: CollectiveLog) -> None:
        """Watch ``log`` too, if all of its ranks are watched and no other watch has it."""
        if log.watch is None and log.world_size > 1 and self.lives and set(log.ranks) <= set(self.ranks):
            log.watch = self
            self.logs.append(log)

    @property
    def lives(self) -> bool:
        """torch's default group is the one that was there when the watch began."""
        return dist.group.WORLD is self._group

    @property
    def interval(self) -> float:
        return max(0.1, min(MAX_INTERVAL_S, self.timeout / 8))

    # -- called where collectives are issued ----------------------------------------------------------------------

    def diverged(self, log: CollectiveLog) -> None:
        """Another rank noted another collective.

        Raises:
            DivergenceError: always.
        """
        self._speaks = True
        raise DivergenceError(self._confer(self._different(log)))

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
                if not self.lives:
                    break
                self._tick()
            if not self.lives:
                self._publish(self._farewell(""))  # not heard of any more, and not missed
        except RuntimeError:  # the store is gone, and with it the rank that kept it: there is nothing to compare with
            pass
        finally:
            self._wake.set()

    def _guard(self) -> None:
        """End the process where the thread waits for a store that does not answer, and nothing else happens either."""
        seen, seconds, before = (-1, -1), 0.0, time.monotonic()
        while not self._wake.wait(self.interval):
            now, state = time.monotonic(), (self._beat, sum(log.count for log in self.logs))
            seconds = seconds + min(now - before, 2 * self.interval) if state == seen else 0.0
            seen, before = state, now
            alarmed = 3 * (self.interval + ANSWER_S) if self._alarmed else 0.0
            if seconds >= self.timeout + alarmed:
                reason = (
                    f"rank {self.rank} has issued nothing for {seconds:.0f} s, and the store of the process group has "
                    "not answered for as long: the process that keeps it (rank 0, unless the launcher does) is stopped"
                )
                _tell(describe(reason, {self.rank: self._state_in_full()}, self.ranks))
                _exit()

    def _tick(self) -> None:
        now = time.monotonic()
        # No more than a little of it counts: this process may have been stopped itself.
        self._passed, self._now = min(now - self._now, 2 * self.interval), now
        places = {log.key: self._place(log, now) for log in list(self.logs)}
        idle = min(place["idle"] for place in places.values())
        self._publish({"axes": places, "idle": idle, "beat": self._beat})
        self._beat += 1
        if self._speaks:
            return
        if self.store.check(["alarm"]):
            self._end(None)
        states = _States(self)
        for log in list(self.logs):
            compared = log.compared and self.rank != log.ranks[0]
            if compared and _differ(places[log.key], states[log.ranks[0]], log.key, self.interval):
                self._end(self._different(log))
        if idle >= 2 * self.interval:
            for log in list(self.logs):
                self._look_round(log, places[log.key]["count"], idle, states)

    def _place(self, log: CollectiveLog, now: float) -> dict[str, Any]:
        """How far this rank is on an axis."""
        count, digest = log.count, log.digest
        seen, since = self._since.get(log.key, (-1, now))
        if count != seen:
            self._since[log.key] = count, (since := now)
        return {"count": count, "idle": now - since, "marks": list(log.marks), "digest": digest}

    def _different(self, log: CollectiveLog) -> str:
        return f"the ranks of this run issue different collectives{self._where(log)}"

    def _where(self, log: CollectiveLog) -> str:
        """On which axis, where there is a choice; or at what."""
        if not log.compared:
            return f" at {log.at}" if log.at else ""
        return f" in the axis {log.name!r}" if sum(each.count > 0 for each in self.logs) > 1 else ""

    def _look_round(self, log: CollectiveLog, count: int, idle: float, states: _States) -> None:
        """This rank stands still: whom does it wait for on this axis?"""
        for rank in log.others(self.rank):
            state = states[rank]
            silent = states.silent(rank)
            theirs = state["axes"].get(log.key, _NOWHERE)["count"]
            behind = theirs < count or not log.compared
            inside = log.inside and "ended" not in state  # a blocking one, which the other may be in as well
            waits = f"rank {self.rank} waits{self._where(log)} for rank {rank}, which"
            if behind and "ended" in state:
                self._end(f"{waits} has ended")
            if (behind or inside) and min(idle, silent) >= self.timeout:
                why = "it is stopped, or in a call that keeps Python from running"
                self._end(f"{waits} does not answer: nothing was heard of it for {silent:.0f} s ({why})")
            if behind and min(idle, state["idle"]) >= self.timeout:
                self._end(f"{waits} has issued nothing for {state['idle']:.0f} s")
            if "ended" not in state and silent < self.timeout:
                return

    def silent(self, rank: int, state: Mapping[str, Any]) -> float:
        """Seconds for which ``rank`` has published nothing, as far as this rank has looked; once a tick."""
        beat, seconds = self._heard.get(rank, (None, 0.0))
        seconds = seconds + self._passed if state.get("beat") == beat else 0.0
        self._heard[rank] = state.get("beat", -1), seconds
        return seconds

    # -- the alarm ------------------------------------------------------------------------------------------------

    def _end(self, reason: str | None) -> None:
        for log in self.logs:  # the ranks answer one after another: who goes on meanwhile forgets where they parted
            log.before = _rest
        first = reason is not None and self.store.compare_set("alarm", "", str(self.rank)) == str(self.rank).encode()
        if first and reason is not None:
            _tell(self._confer(reason))
        else:
            self._alarmed = True
            self._answer()
            deadline = time.monotonic() + 2 * (self.interval + ANSWER_S)
            with contextlib.suppress(RuntimeError):
                while not self.store.check(["told"]) and time.monotonic() < deadline:
                    time.sleep(0.1)
                time.sleep(LEAD_S)
        _exit()

    def _confer(self, reason: str, *, only_if_apart: bool = False) -> str:
        """The report, ``""`` if the ranks turn out to be equally far and that was asked for.

        The rank that raised the alarm asks all of them, the others take its word.
        """
        self._alarmed = True
        first = self.store.compare_set("alarm", "", str(self.rank)) == str(self.rank).encode()
        self._answer()
        seconds = self.interval + ANSWER_S
        deadline = time.monotonic() + (seconds if first else 2 * seconds)
        answers: dict[int, dict[str, Any]] = {}
        asks = first
        while len(answers) < len(self.ranks) and time.monotonic() < deadline:
            if not asks and self.store.check(["told"]):
                text = self.store.get("told").decode()
                if text or only_if_apart:
                    return text
                asks = True  # the ranks seemed to be equally far before this one saw the difference
            for rank in self.ranks if asks else ():
                key = f"answer/{rank}"
                if rank not in answers and self.store.check([key]):
                    answers[rank] = json.loads(self.store.get(key))
            time.sleep(0.05)
        answers.setdefault(self.rank, self._state_in_full())
        text = "" if only_if_apart and self._together(answers) else describe(reason, answers, self.ranks)
        self.store.set("told", text)
        return text

    def _together(self, answers: Mapping[int, Mapping[str, Any]]) -> bool:
        """All have answered, none of them ended by an error, and on each axis its ranks have issued the same."""
        axes: dict[str, dict[int, Any]] = {}
        for rank, answer in answers.items():
            for key, place in answer["axes"].items():
                axes.setdefault(key, {})[rank] = place
        if len(answers) < len(self.ranks) or any(answer.get("ended") for answer in answers.values()):
            return False
        return all(first_difference(places) is None for places in axes.values())

    def _state_in_full(self) -> dict[str, Any]:
        """What a report tells of this rank."""
        now = time.monotonic()
        axes = {log.key: {**log.latest(), "idle": now - self._since.get(log.key, (0, now))[1]} for log in self.logs}
        last = min(self.logs, key=lambda log: axes[log.key]["idle"])
        at = next((_at(log, self.rank) for log in self.logs if log.at), "")
        return {"axes": axes, "idle": axes[last.key]["idle"], "stack": _stack(last.thread), "at": at}

    def _farewell(self, ended: str) -> dict[str, Any]:
        """The last state that this rank publishes."""
        now = time.monotonic()
        places = {log.key: self._place(log, now) for log in self.logs}
        return {"axes": places, "idle": min(place["idle"] for place in places.values()), "ended": ended}

    def _answer(self, ended: str | None = None) -> None:
        answer = self._state_in_full()
        if ended is not None:
            answer |= {"ended": ended, "stack": ""}
        self.store.set(f"answer/{self.rank}", json.dumps(answer))

    def _publish(self, state: Mapping[str, Any]) -> None:
        self.store.set(f"state/{self.rank}", json.dumps(state))

    def _leave(self) -> None:
        """The process ends: say so."""
        if os.getpid() != self._pid:
            return
        self._wake.set()
        self._thread.join(ANSWER_S)  # the interpreter must not end while the thread is inside the store's C++
        lives, self._group = self.lives, None  # who holds the group keeps gloo's threads, which must end before Python
        if not lives or self._speaks:
            return
        error = getattr(sys, "last_value", None)
        ended = "" if error is None else "".join(traceback.format_exception_only(error)).strip()
        with contextlib.suppress(RuntimeError):
            self._publish(self._farewell(ended))
            self._answer(ended)


_NOWHERE = {"count": 0, "idle": 0.0, "marks": [], "digest": 0}  # of a rank that has not begun on an axis
_NOTHING = {"axes": {}, "idle": 0.0, "beat": -1}  # of a rank that has said nothing


class _States:
    """What other ranks have published, each read once a tick."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._read: dict[int, dict[str, Any]] = {}
        self._silent: dict[int, float] = {}

    def __getitem__(self, rank: int) -> dict[str, Any]:
        if rank not in self._read:
            store, key = self._watch.store, f"state/{rank}"
            self._read[rank] = json.loads(store.get(key)) if store.check([key]) else _NOTHING
        return self._read[rank]

    def silent(self, rank: int) -> float:
        if rank not in self._silent:
            self._silent[rank] = self._watch.silent(rank, self[rank])
        return self._silent[rank]


def _differ(mine: Mapping[str, Any], state: Mapping[str, Any], key: str, interval: float) -> bool:
    """Whether two ranks have issued different collectives on an axis."""
    other = state["axes"].get(key, _NOWHERE)
    theirs = dict(map(tuple, other["marks"]))
    if any(digest != theirs.get(index, digest) for index, digest in mine["marks"]):
        return True
    resting = min(mine["idle"], other["idle"]) >= 2 * interval  # count and digest belong together
    return bool(resting and mine["count"] == other["count"] and mine["digest"] != other["digest"])


def _tell(text: str) -> None:
    sys.stderr.write(printable(f"\nDivergenceError: {text}\n"))
    _record_for_torchrun(text)


def _rest() -> None:
    """No more collectives: the process is about to end."""
    threading.Event().wait()


def _exit() -> None:
    """The main thread is inside a collective that will not end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _at(log: CollectiveLog, rank: int) -> str:
    """What this process is doing, and for whom it waits where that is a single one."""
    peers = [] if log.compared else log.others(rank)
    return f"{log.at}, waiting for {ranks_text(peers)}" if peers else log.at


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
