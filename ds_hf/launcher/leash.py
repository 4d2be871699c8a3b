"""What holds the hosts of a run together: one host's failure, or loss, ends the run everywhere.

The store that torch's agents meet in (a TCPStore on the first host) also carries, under a prefix of this run:
``beat/N`` heartbeats, ``hello/N`` who joined, ``go``, ``failed/A/N`` the failures of host N in attempt A, ``done/A/N``,
and ``end/A``, the one decision that the first host takes: how attempt A ends for all. A host that hears nothing from
the first one for ``LOST_S`` ends by itself. Threads here talk to the store; the main thread runs the workers and is
woken by SIGTERM to itself, which is how torch's agent is told to stop.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from ds_hf.launcher.failure import Failure, describe, exit_code, first_of, from_json
from ds_hf.launcher.ports import free_port
from ds_hf.launcher.spec import NodeSpec

__all__ = ["Ending", "Leash"]

BEAT_S = 0.5
LOST_S = 10.0
STUCK_S = 14.0  # the main thread has not come out of C++ so long after it was told to
JOIN_S = 300.0
SETTLE_S = 1.0  # how long later reports may still turn out to be of an earlier failure


@dataclass(frozen=True)
class Ending:
    """How an attempt ends on every host: ``kind`` is done, failed, lost, stopped or restart (then ``port`` is new)."""

    kind: str
    code: int
    text: str = ""
    port: int = 0


class Leash:
    """One host's end of it; create it in the main thread, then ``wait_go``, and tell it what happens to the workers."""

    def __init__(self, spec: NodeSpec, node: int, versions: str, when_stuck: Callable[[int], None]) -> None:
        self.spec, self.node, self.versions = spec, node, versions
        self.attempt = 0
        self.ending: Ending | None = None
        self._when_stuck = when_stuck  # given the exit code; does not return
        self._go = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running = False  # the main thread is inside torch's agent: SIGTERM wakes it
        self._gone = False
        self._posts: list[tuple[str, str]] = []
        self._last_word = time.monotonic()
        self._connected = False
        threading.Thread(target=self._talk, daemon=True, name="leash").start()
        threading.Thread(target=self._watch, daemon=True, name="leash-watch").start()

    # --- for the main thread

    def wait_go(self) -> Ending | None:
        """Wait until every host has joined; the ending if it comes to that instead."""
        return self._wait(lambda: self._go or self.ending is not None, None)

    def workers_run(self, running: bool) -> Ending | None:
        """From now on the agent runs (or no longer); returns an ending that came before, and then it must not start."""
        with self._lock:
            self._running = running and self.ending is None
            return self.ending

    def failed(self, failures: list[Failure]) -> None:
        """Workers of this host failed; called before the agent has stopped the others."""
        self._post("failed", json.dumps([failure.as_json() for failure in failures]))

    def stopped(self, signum: int) -> None:
        """This host's agent was sent a signal."""
        self._post("stopped", json.dumps(signum))

    def done(self) -> None:
        """All workers of this host ended well."""
        self._post("done", "1")

    def end(self, ending: Ending) -> None:
        """End this host's part, for a reason that was found here."""
        with self._lock:
            self._settle(ending)

    def wait_ending(self, timeout: float | None = None) -> Ending | None:
        """Wait for the decision; None when ``timeout`` seconds have passed."""
        return self._wait(lambda: self.ending is not None, timeout)

    def next_attempt(self) -> int:
        """Go on after a restart; returns the number of the attempt."""
        with self._lock:
            self.attempt, self.ending, self._running = self.attempt + 1, None, False
            return self.attempt

    def close(self) -> None:
        """Stop talking; the first host leaves a moment for the others to read the ending."""
        if self.node == 0:
            time.sleep(3 * BEAT_S)
        self._gone = True

    # --- threads

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> Ending | None:
        limit = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not ready() and (limit is None or time.monotonic() < limit):
                self._changed.wait(0.2)  # short, so that signals are seen
            return self.ending

    def _post(self, kind: str, text: str) -> None:
        with self._lock:
            self._posts.append((f"{kind}/{self.attempt}/{self.node}", text))

    def _settle(self, ending: Ending) -> None:
        """Record ``ending``, wake the main thread; the lock is held."""
        if self.ending is None:
            self.ending = ending
            self._changed.notify_all()
            if self._running:
                self._running = False
                os.kill(os.getpid(), signal.SIGTERM)

    def _talk(self) -> None:
        """The only thread that uses the store; it may block, and ``_watch`` sees that."""
        spec = self.spec
        try:
            server = TCPStore(
                spec.master_addr,
                spec.master_port,
                is_master=self.node == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=JOIN_S),
                multi_tenant=True,
            )
            store = PrefixStore(f"ds_hf/{spec.run_id}", server)
            store.set(f"hello/{self.node}", json.dumps([self.versions, socket.gethostname()]))
        except (RuntimeError, ValueError) as error:
            what = "open" if self.node == 0 else "reach"
            text = (
                f"host {spec.hosts[self.node]}: could not {what} {spec.master_addr}:{spec.master_port}: {error}"
                "\n  fix: another --master_port, a --master_addr that every host reaches, or open the firewall"
            )
            self.end(Ending("lost", 1, text))
            return
        hub = _Hub(spec, store) if self.node == 0 else None
        while not self._gone:
            try:
                self._exchange(store, hub)
            except RuntimeError:
                time.sleep(BEAT_S)  # ``_watch`` decides when it is too long
                continue
            self._connected, self._last_word = True, time.monotonic()
            time.sleep(BEAT_S)

    def _exchange(self, store: Any, hub: _Hub | None) -> None:
        with self._lock:
            posts, attempt = list(self._posts), self.attempt
        for key, text in posts:
            store.set(key, text)
        with self._lock:
            del self._posts[: len(posts)]
        if posts:
            store.add("news", 1)
        store.add(f"beat/{self.node}", 1)
        if hub is not None:
            hub.look(attempt)
        if not self._go and store.check(["go"]):
            self._go = True
        if store.check([f"end/{attempt}"]):
            ending = Ending(**json.loads(store.get(f"end/{attempt}")))
            with self._lock:
                if attempt == self.attempt:
                    self._settle(ending)

    def _watch(self) -> None:
        """Ends this host's part when the first host is gone, or the main thread is; never blocks on the network."""
        ended_at: float | None = None
        while not self._gone:
            time.sleep(BEAT_S)
            ended_at = (ended_at or time.monotonic()) if self.ending is not None else None
            if self.ending is not None and ended_at is not None and time.monotonic() - ended_at > STUCK_S:
                self._when_stuck(self.ending.code)
            silent = time.monotonic() - self._last_word
            if self._connected and silent > LOST_S and self.ending is None:
                spec = self.spec
                self.end(
                    Ending(
                        "lost",
                        1,
                        f"host {spec.hosts[self.node]}: nothing heard from host {spec.hosts[0]} "
                        f"({spec.master_addr}:{spec.master_port}) for {silent:.0f} s; its part of the run ends"
                        "\n  fix: check that host and network are up, then start again from the last checkpoint",
                    )
                )


class _Hub:
    """The first host's part: reads what all hosts posted and decides how an attempt ends. Used by one thread."""

    def __init__(self, spec: NodeSpec, store: Any) -> None:
        self.spec, self.store = spec, store
        self.started = time.monotonic()
        self.beats: dict[int, tuple[int, float]] = {}
        self.news = -1
        self.arrivals: dict[str, tuple[float, list[Failure]]] = {}
        self.decided = -1
        self.go = False

    def look(self, attempt: int) -> None:
        """One round."""
        if self.decided >= attempt:
            return
        now = time.monotonic()
        lost = self._lost(now)
        if lost is not None:
            self._decide(attempt, lost)
            return
        if not self.go:
            self._start_all(attempt, now)
        news = self.store.add("news", 0)
        if news != self.news:
            self.news = news
            self._read(attempt, now)
        self._judge(attempt, now)

    def _lost(self, now: float) -> Ending | None:
        for node, host in enumerate(self.spec.hosts):
            count = self.store.add(f"beat/{node}", 0)
            before, since = self.beats.get(node, (0, self.started))
            if count != before:
                self.beats[node] = (count, now)
            elif before and now - since > LOST_S:
                text = f"host {host} is lost: nothing heard from it for {now - since:.0f} s; the run ends"
                fix = "check that host and network are up, then start again from the last checkpoint"
                return Ending("lost", 1, f"{text}\n  fix: {fix}")
            elif not before and now - self.started > JOIN_S:
                text = f"host {host} has not joined within {JOIN_S:.0f} s"
                return Ending(
                    "lost", 1, f"{text}\n  fix: check what it printed, and that it reaches {self.spec.master_addr}"
                )
        return None

    def _start_all(self, attempt: int, now: float) -> None:
        nodes = range(len(self.spec.hosts))
        if not all(self.store.check([f"hello/{node}"]) for node in nodes):
            return
        versions = [json.loads(self.store.get(f"hello/{node}"))[0] for node in nodes]
        for node in nodes:
            if versions[node] != versions[0]:
                hosts = self.spec.hosts
                text = f"host {hosts[node]} has {versions[node]}, and host {hosts[0]} has {versions[0]}"
                self._decide(attempt, Ending("failed", 1, f"{text}\n  fix: install the same versions on every host"))
                return
        self.go = True
        self.store.set("go", "1")
        self.beats = {node: (self.beats[node][0], now) for node in nodes}

    def _read(self, attempt: int, now: float) -> None:
        for node in range(len(self.spec.hosts)):
            key = f"failed/{attempt}/{node}"
            if key not in self.arrivals and self.store.check([key]):
                found = [from_json(value) for value in json.loads(self.store.get(key))]
                self.arrivals[key] = (now, found)

    def _judge(self, attempt: int, now: float) -> None:
        hosts = self.spec.hosts
        here = {key: value for key, value in self.arrivals.items() if key.startswith(f"failed/{attempt}/")}
        if here:
            if now - min(arrival for arrival, _ in here.values()) >= SETTLE_S:
                self._failed(attempt, [_aged(f, now - arrival) for arrival, found in here.values() for f in found])
            return
        nodes = range(len(hosts))
        if all(self.store.check([f"done/{attempt}/{node}"]) for node in nodes):
            self._decide(attempt, Ending("done", 0))
            return
        for node in nodes:
            if self.store.check([f"stopped/{attempt}/{node}"]):
                signum = int(json.loads(self.store.get(f"stopped/{attempt}/{node}")))
                name = signal.Signals(signum).name
                self._decide(attempt, Ending("stopped", 128 + signum, f"host {hosts[node]} was stopped by {name}"))
                return

    def _failed(self, attempt: int, failures: list[Failure]) -> None:
        text, code = describe(failures), exit_code(first_of(failures).code)
        left = self.spec.max_restarts - attempt
        if left <= 0:
            self._decide(attempt, Ending("failed", code, text))
            return
        text = f"{text}\nstarting again, attempt {attempt + 1} of {self.spec.max_restarts}"
        self._decide(attempt, Ending("restart", code, text, free_port()))

    def _decide(self, attempt: int, ending: Ending) -> None:
        self.decided = attempt
        self.store.set(f"end/{attempt}", json.dumps(asdict(ending)))


def _aged(failure: Failure, seconds: float) -> Failure:
    return Failure(**{**failure.as_json(), "age": failure.age + seconds})
