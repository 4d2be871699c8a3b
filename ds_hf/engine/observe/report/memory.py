"""Memory by kind over one step: looked at wherever a span begins or ends.

On a GPU the allocator knows the total; elsewhere tensors are counted, as the autotuner's trials do. That takes time, so
it is done in the second step alone, which no figure of time is made of.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.engine.observe.probes.trial.memory import _Tracker
from ds_hf.engine.observe.report.recorder import Recorder
from ds_hf.engine.observe.report.spans import Key

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["KINDS", "MEMORY_STEP", "MemoryWatch"]

MEMORY_STEP = 2  # from the start
KINDS = ("parameters", "optimizer states", "gradients", "activations and others")
MOST_POINTS = 600


class MemoryWatch:
    """Of one step of ``engine``, from when it is made until ``result``."""

    def __init__(self, engine: CoreEngine, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._cuda = engine.device.type == "cuda"
        buffers = [buffer for unit in engine.units for buffer in unit.buffers]
        weights = [tensor for buffer in buffers for tensor in (buffer.full, buffer.shard)]
        self._parameters = _storages([*weights, *(p.data for p in engine.module.parameters())], engine.device)
        self._states = _storages(_states(engine), engine.device, self._parameters)
        self._mode: Any = nullcontext() if self._cuda else _Tracker(engine, None)
        self._points: list[tuple[float, ...]] = []
        self._places: list[str] = []
        self._begun = time.perf_counter()
        recorder.memory = self
        self._look("the beginning of the step")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around each phase: tensors that it makes are counted."""
        with self._mode:
            yield

    def before(self, key: Key) -> None:
        """A span begins."""
        self._look(f"before {key.operation} of {key.place}" if key.operation else f"before {key.place}")

    def after(self) -> None:
        """One has ended."""
        self._look("")

    def _look(self, place: str) -> None:
        engine = self._engine
        parameters = sum(storage.nbytes() for storage in self._parameters.values())
        states = sum(storage.nbytes() for storage in self._states.values())
        gradients = sum(gradient.nbytes for gradient in engine.reducer.buffers)
        if self._cuda:
            total = int(torch.cuda.memory_allocated(engine.device))
        else:
            total = self._mode.live + sum(storage.nbytes() for storage in self._mode.resizable)
        others = max(0, total - parameters - states - gradients)
        self._points.append((time.perf_counter() - self._begun, parameters, states, gradients, others))
        self._places.append(place or (self._places[-1].replace("before ", "after ") if self._places else ""))

    def result(self, number: int, rank: int) -> dict[str, Any]:
        """The line for the file; the recorder is as it was."""
        self._recorder.memory = None
        totals = [sum(point[1:]) for point in self._points]
        peak = max(range(len(totals)), key=totals.__getitem__)
        stride = -(-len(totals) // MOST_POINTS)
        kept = [index for index in range(len(totals)) if index % stride == 0 or index == peak]
        return {
            "memory": 1,
            "rank": rank,
            "number": number,
            "kinds": KINDS,
            "points": [self._points[index] for index in kept],
            "places": [self._places[index] for index in kept],
            "peak": int(torch.cuda.max_memory_allocated(self._engine.device)) if self._cuda else int(totals[peak]),
        }


def _states(engine: CoreEngine) -> Iterator[Tensor]:
    assert engine.optimizer is not None
    yield from (*engine.optimizer.masters.values(), *engine.optimizer.low_bits.values())
    for state in engine.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Any, device: torch.device, known: Any = ()) -> dict[int, Any]:
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == device.type}
    return {key: storage for key, storage in found.items() if key not in known}
