"""Processes build together or not at all: what one refuses ends all of them, with its text.

While an engine, or the stages of a pipeline, are built, processes wait for each other in collectives and in the making
of groups. A fault of one alone (a file of its own, a layer that does not fit, no memory) would leave the others there.
Inside ``building`` a process that fails says so in the store of the process group. The others raise where they meet
next: in ``compare`` and at the end of the block. One that sits in a collective by then cannot raise; a thread tells the
fault there and ends the process.

``compare`` also holds what the processes were given against each other, before anything is made of it. All of it goes
through the store: no collective is issued, and what is sent are digests, so it costs some round trips in all.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import warn_once
from ds_hf.printable import printable

__all__ = ["Building", "building", "difference", "open_store"]

GRACE_S, STEP_S = 5.0, 0.1  # a process that could raise by itself has done so by then
EXIT_S = 10.0  # that the end of Python waits for a thread, which it would cut off inside torch: that aborts the process
_MISSING = "nothing"
_SAME = (
    "Processes that train one model need the same configuration, model and optimizer: give all of them the same "
    "arguments, environment and files"
)
_ONE_PROCESS = ("fake", "threaded")  # backends of torch whose ranks are one process

_open: ContextVar[Building | None] = ContextVar("ds_hf_building", default=None)
# Of each default group its number, and how many blocks these ranks have entered together.
_worlds: WeakKeyDictionary[dist.ProcessGroup, tuple[int, Counter[tuple[int, ...]]]] = WeakKeyDictionary()
_numbers = itertools.count()
_watching: WeakSet[threading.Thread] = WeakSet()


class Building:
    """One block, of one process; a process alone asks nobody."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], what: str) -> None:
        self.store, self.rank, self.ranks, self.what = store, rank, tuple(ranks), what
        self._meetings = itertools.count()
        self._done = threading.Event()

    # -- what every process says ----------------------------------------------------------------------------------

    def compare(
        self, mine: Mapping[str, str], peers: Sequence[int] | None = None, *, doubtful: Mapping[str, str] | None = None
    ) -> None:
        """That all processes have the same; a meeting of all of them.

        Args:
            mine: what is compared, in the order in which differences are told.
            doubtful: what may differ for a reason: that is told by the process that differs, and all go on.
            peers: with whom, by default all; the first of them is what the others are held against. Lists of different
                processes are equal or have no process in common.

        Raises:
            ConfigError: on all processes, with the first difference of the first process that has one.
        """
        if self.store is None:
            return
        ranks = tuple(peers or self.ranks)
        name, text = f"compared/{next(self._meetings)}", json.dumps([dict(mine), dict(doubtful or {})])
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        if self.rank == ranks[0]:
            self.store.set(f"{name}/{self.rank}/text", zlib.compress(text.encode()))
            self.store.set(f"{name}/{self.rank}", digest)
        elif self._answer(f"{name}/{ranks[0]}") != digest.encode():
            first, unsure = json.loads(zlib.decompress(self.store.get(f"{name}/{ranks[0]}/text")))
            if first != dict(mine):
                raise ConfigError(f"{difference(first, mine, ranks[0], self.rank)}. {_SAME}", self.what)
            odd = difference(unsure, doubtful or {}, ranks[0], self.rank)
            warn_once(
                f"{self.what}: {odd}. If that is no number of one process, the result is wrong: {_SAME}",
                everywhere=True,
            )
        self.meet(name)

    def meet(self, name: str = "") -> None:
        """Go on when all have come here: before a collective, so that what one refused is raised and nothing waits.

        Raises:
            ConfigError, DsHfError: what another process raised.
        """
        if self.store is None:
            return
        name = name or f"meeting/{next(self._meetings)}"
        if self.store.add(f"{name}/came", 1) == len(self.ranks):
            self.store.set(f"{name}/all", "ok")
        self._answer(f"{name}/all")

    def _answer(self, key: str) -> bytes:
        """The value of ``key`` when it is there, if no process has failed by then."""
        pause, deadline = 0.001, time.monotonic() + dist.default_pg_timeout.total_seconds()
        while not self.store.check([key]):
            self._raise_failure()
            if time.monotonic() > deadline:
                raise DsHfError(
                    f"rank {self.rank} has waited {dist.default_pg_timeout} for others in {self.what} ({key}): one of "
                    "them does not call it, or is still before it"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return bytes(self.store.get(key))

    def _raise_failure(self) -> None:
        told = self._failure()
        if told is not None:
            raise ConfigError(_text(told), self.what) if told["config"] else DsHfError(_text(told))

    def _failure(self) -> dict[str, Any] | None:
        if not self.store.check(["failed"]):
            return None
        found: dict[str, Any] = json.loads(self.store.get("failed"))
        return found

    # -- what happens around the block ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch for others that fail, from the moment when it takes long.

        By a thread, which connects itself: torch asks for the name of every address that it connects to, and waits for
        seconds where there is no answer.
        """
        if self.store is not None:
            thread = threading.Thread(target=self._watch, name="ds_hf building", daemon=True)
            _watching.add(thread)
            thread.start()

    def end(self) -> None:
        """All have built it."""
        self.meet("end")

    def over(self) -> None:
        """It is left, however that is."""
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """This process raises ``error``."""
        self.over()
        if self.store is None:
            return
        text = printable(str(error).strip()) or "no text"
        if not isinstance(error, ConfigError):
            text = f"{type(error).__name__}: {text}"
        told = {"rank": self.rank, "what": self.what, "text": text, "config": isinstance(error, ConfigError)}
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone: others hear of it
            self.store.compare_set("failed", "", json.dumps(told))

    def _watch(self) -> None:
        if self._done.wait(0.5):
            return
        with contextlib.suppress(RuntimeError):  # a store that has no second connection, or is gone
            store = self.store.clone()
            while not self._done.wait(0.5):
                if not store.check(["failed"]):
                    continue
                told = json.loads(store.get("failed"))
                # in steps: where the whole process was kept waiting, all of the time would be over at once
                if not any(self._done.wait(STEP_S) for _ in range(round(GRACE_S / STEP_S))):
                    sys.stderr.write(f"{_text(told)}\n(rank {self.rank} waits for it in a collective and ends)\n")
                    sys.stderr.flush()
                    os._exit(1)


@atexit.register
def _let_watches_end() -> None:
    """For a while only: who keeps the store may be gone, and torch goes on trying for minutes."""
    deadline = time.monotonic() + EXIT_S
    for thread in list(_watching):
        thread.join(max(0.0, deadline - time.monotonic()))


def _text(told: Mapping[str, Any]) -> str:
    return f"rank {told['rank']} failed in {told['what']}, so no process goes on: {told['text']}"


def difference(first: Mapping[str, str], mine: Mapping[str, str], one: int, other: int) -> str:
    """What rank ``one`` and this one, ``other``, do not have in common, for a sentence."""
    names = [*first, *(name for name in mine if name not in first)]
    odd = [name for name in names if first.get(name, _MISSING) != mine.get(name, _MISSING)]
    name = odd[0]
    more = f"; {len(odd) - 1} more differ: {', '.join(odd[1:5])}{', ...' if len(odd) > 5 else ''}" if odd[1:] else ""
    return f"{name} is {first.get(name, _MISSING)} on rank {one} and {mine.get(name, _MISSING)} on rank {other}{more}"


def open_store() -> Any:
    """A place in the store for what is being built, and alone for that; ``None`` where there is none."""
    made = _open.get()
    return None if made is None or made.store is None else PrefixStore("later", made.store)


def _store(ranks: tuple[int, ...]) -> Any:
    """Keys of the block that these ranks enter now; ``None`` where there is none to ask, or no store."""
    world = dist.group.WORLD
    if len(ranks) == 1 or world is None or dist.get_backend() in _ONE_PROCESS:
        return None
    if world not in _worlds:
        _worlds[world] = next(_numbers), Counter()
    number, blocks = _worlds[world]
    blocks[ranks] += 1
    among = blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    try:
        return PrefixStore(f"ds_hf/building/{number}/{among}/{blocks[ranks]}", _get_default_store())
    except ValueError:  # a backend that needs none
        return None


@contextlib.contextmanager
def building(what: str, ranks: Sequence[int] | None = None) -> Iterator[Building]:
    """Build something with all processes; blocks inside one are that one. All processes of ``ranks`` enter together.

    Args:
        what: what is built, for the text.
        ranks: who builds it, by default all processes.

    Raises:
        ConfigError, DsHfError: another process raised inside; ``ConfigError`` where that did.
    """
    if (outer := _open.get()) is not None:
        yield outer
        return
    together = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    made = Building(_store(together), dist.get_rank(), together, what)
    token = _open.set(made)
    try:
        made.begin()
        yield made
        made.end()
    except Exception as error:
        made.fail(error)
        raise
    finally:
        made.over()
        _open.reset(token)
