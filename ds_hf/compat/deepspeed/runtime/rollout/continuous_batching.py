"""Which requests are decoded together (``deepspeed.runtime.rollout.continuous_batching``, DeepSpeed 0.19.8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

__all__ = ["ContinuousBatchRequest", "ContinuousBatchScheduler", "ContinuousBatchUpdate"]


@dataclass(frozen=True)
class ContinuousBatchRequest:
    """A request that waits for its turn."""

    request_id: Hashable


@dataclass(frozen=True)
class ContinuousBatchUpdate:
    """One change of the batch.

    Attributes:
        active: requests in the batch now, in the order of their rows.
        keep_slots: rows of the batch before that stay; they move to the front.
        retired: requests that left.
        admitted: requests that came, into the rows behind those that stay.
    """

    active: tuple[ContinuousBatchRequest, ...]
    keep_slots: tuple[int, ...]
    retired: tuple[Hashable, ...]
    admitted: tuple[ContinuousBatchRequest, ...]

    @property
    def active_ids(self) -> tuple[Hashable, ...]:
        return tuple(request.request_id for request in self.active)

    @property
    def admitted_slots(self) -> tuple[int, ...]:
        """Rows of those that came."""
        return tuple(range(len(self.active) - len(self.admitted), len(self.active)))


class ContinuousBatchScheduler:
    """First come, first served; at most ``max_batch_size`` requests at a time, each for ``max_new_tokens`` at most.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(self, max_batch_size: int, max_new_tokens: int) -> None:
        if max_batch_size <= 0:
            raise ValueError("max_batch_size must be positive")
        if max_new_tokens <= 0:
            raise ValueError("max_new_tokens must be positive")
        self.max_batch_size, self.max_new_tokens = max_batch_size, max_new_tokens
        self._waiting: deque[ContinuousBatchRequest] = deque()
        self._running: dict[Hashable, tuple[ContinuousBatchRequest, int]] = {}  # with its number of tokens

    @property
    def active(self) -> tuple[ContinuousBatchRequest, ...]:
        return tuple(request for request, _ in self._running.values())

    @property
    def pending(self) -> tuple[ContinuousBatchRequest, ...]:
        return tuple(self._waiting)

    def submit(self, request: ContinuousBatchRequest) -> None:
        """Add a request.

        Raises:
            TypeError: it is something else.
            ValueError: one with its id waits or runs.
        """
        if not isinstance(request, ContinuousBatchRequest):
            raise TypeError("request must be a ContinuousBatchRequest")
        if request.request_id in self._running or request in self._waiting:
            raise ValueError(f"duplicate request_id: {request.request_id!r}")
        self._waiting.append(request)

    def schedule(self, finished_ids: Iterable[Hashable] = ()) -> ContinuousBatchUpdate:
        """Let those that finished go, and others in.

        Raises:
            ValueError: a finished one does not run.
        """
        finished = self._known(finished_ids)
        keep = tuple(slot for slot, key in enumerate(self._running) if key not in finished)
        retired = tuple(key for key in self._running if key in finished)
        for key in retired:
            del self._running[key]
        admitted = []
        while self._waiting and len(self._running) < self.max_batch_size:
            request = self._waiting.popleft()
            self._running[request.request_id] = request, 0
            admitted.append(request)
        return ContinuousBatchUpdate(self.active, keep, retired, tuple(admitted))

    def advance(self, finished_ids: Iterable[Hashable] = ()) -> ContinuousBatchUpdate:
        """Every running request has one token more; then as ``schedule``, with those that have all of theirs."""
        finished = self._known(finished_ids)
        for key, (request, tokens) in self._running.items():
            self._running[key] = request, tokens + 1
            if tokens + 1 >= self.max_new_tokens:
                finished.add(key)
        return self.schedule(finished)

    def _known(self, finished_ids: Iterable[Hashable]) -> set[Hashable]:
        finished = set(finished_ids)
        for key in finished:
            if key not in self._running:
                raise ValueError(f"finished request is not active: {key!r}")
        return finished
