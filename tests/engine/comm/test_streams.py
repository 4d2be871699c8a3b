"""Communication streams on the CPU: collectives that are under way are awaited in time, in order, and their errors too.

What only a GPU does is in ``tests/gpu/test_overlap.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_hf.engine.comm import streams
from ds_hf.engine.comm.streams import CommStream, wait


def collective(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_without_a_stream_everything_is_done_at_once() -> None:
    stream = CommStream(torch.device("cpu"))
    with stream:
        value = torch.ones(2).add_(1)
    assert stream.event() is None
    stream.keep([value])
    stream.settle()
    stream.join()
    wait(stream.event())
    assert value.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("end", ["arrive", "join"])
def test_small_collectives_are_awaited_in_their_order(end: str) -> None:
    log: list[str] = []
    stream = CommStream()
    for name in "abc":
        stream.await_later(collective(log, name), 8)
    assert log == []
    getattr(stream, end)()
    assert log == ["a", "b", "c"]
    getattr(stream, end)()
    assert log == ["a", "b", "c"], "each once"


def test_no_more_than_a_few_megabytes_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "UNDER_WAY_NBYTES", 100)
    log: list[str] = []
    stream = CommStream()
    stream.await_later(collective(log, "a"), 60)
    stream.await_later(collective(log, "b"), 40)
    assert log == []
    stream.await_later(collective(log, "c"), 1)
    assert log == ["a", "b", "c"]
    stream.await_later(collective(log, "d"), 100)
    assert log == ["a", "b", "c"], "counted anew"


def test_a_collective_that_failed_is_told_and_forgotten() -> None:
    def fails() -> None:
        raise RuntimeError("the peer is gone")

    log: list[str] = []
    stream = CommStream()
    stream.await_later(fails, 8)
    stream.await_later(collective(log, "a"), 8)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        stream.arrive()
    stream.arrive()  # nothing is left to be awaited twice


def test_an_event_is_any_object_that_waits() -> None:
    class Event:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    event = Event()
    wait(event)
    wait(None)
    assert event.waited == 1
