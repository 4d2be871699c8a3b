"""Puts a recorder on a finished engine, and takes it off again.

The engine's events tell of its phases, the logs of their collectives, and streams, copies and files of what waits for
them; modules have hooks. Copies, files and torch's DataLoader belong to the process and not to the engine, and the last
knows no listeners: its method alone is replaced, until ``Wiring.close``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_hf.engine.comm.log import CollectiveLog, Entry
from ds_hf.engine.events import Observer, Phase, Waits
from ds_hf.engine.observe.model_flops import count_tokens
from ds_hf.engine.observe.report.recorder import Recorder
from ds_hf.engine.observe.report.spans import NEXT_BATCH, Key, kind_of
from ds_hf.engine.offload.aio import FileRequest
from ds_hf.engine.offload.link import Arrival
from ds_hf.engine.zero.unit import in_backward, tensors_in

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Wiring", "places_of"]

MOST_PLACES = 1024


class _Handle(Protocol):
    def remove(self) -> None: ...


class _Listening:
    """A listener in an attribute of an object or a class."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self._target, self._name = target, name
        self._before = getattr(target, name)
        setattr(target, name, value)

    def remove(self) -> None:
        """What was there is there again."""
        setattr(self._target, self._name, self._before)


class _Collectives:
    """How long this process was in each collective, and waited for messages: those are the bubbles of a pipeline."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[tuple[CollectiveLog, Entry], int] = {}  # of the keys
        self._turns: list[int] = []

    def begin(self, log: CollectiveLog) -> None:
        recorder = self._recorder
        self._turns.append(recorder.open_collective(self._key(log)) if recorder.on else -1)

    def end(self, log: CollectiveLog) -> None:
        if self._turns and (turn := self._turns.pop()) >= 0 and self._recorder.on:
            self._recorder.close_collective(turn)

    @contextmanager
    def _span(self, key: Key) -> Iterator[None]:
        recorder = self._recorder
        if not recorder.on:
            yield
            return
        turn = recorder.open_collective(recorder.number(key))
        yield
        recorder.close_collective(turn)

    def waiting(self, log: CollectiveLog) -> AbstractContextManager[None]:
        key = self._recorder.keys[self._key(log)]
        return self._span(key._replace(operation=f"wait for {log.entries[-1][0]}", nbytes=0))

    @contextmanager
    def awaiting(self, log: CollectiveLog, peer: int) -> Iterator[None]:
        recorder = self._recorder
        turn = recorder.open(recorder.number(Key("pipeline", f"rank {peer}"))) if recorder.on else -1
        yield
        recorder.close(turn)

    def _key(self, log: CollectiveLog) -> int:
        """Of the latest entry."""
        entry = log.entries[-1]
        found = self._numbers.get((log, entry))
        if found is None:
            operation, what, numel, dtype = entry
            nbytes = numel * getattr(torch, dtype).itemsize if dtype else 0
            nbytes *= log.world_size if operation == "reduce-scatter" else 1  # noted is what comes out
            key = Key(kind_of(operation, what, log.name), what, operation, nbytes, log.world_size)
            found = self._numbers[log, entry] = self._recorder.number(key)
        return found


def places_of(model: nn.Module, units: set[int]) -> dict[str, nn.Module]:
    """The modules whose time is told apart, by path: units, and beside them the largest ones without units in them.

    Args:
        units: ids of the modules of units.
    """
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> bool:
        """Whether there is a unit at or under ``module``."""
        if id(module) in units and path:
            found[path] = module
            return True
        below = {name: look(child, f"{path}.{name}" if path else name) for name, child in module.named_children()}
        if any(below.values()):
            for name, child in module.named_children():
                if not below[name]:
                    found[f"{path}.{name}" if path else name] = child
        return any(below.values())

    if not look(model, ""):
        children = dict(model.named_children())
        while len(children) == 1:
            ((name, only),) = children.items()
            children = {f"{name}.{each}": child for each, child in only.named_children()} or {name: only}
            if len(children) == 1 and next(iter(children.values())) is only:
                break
        found.update(children)
    usable = {path: module for path, module in found.items() if not isinstance(module, nn.ModuleList | nn.ModuleDict)}
    return dict(list(usable.items())[:MOST_PLACES])


# The span of each phase; a forward that does not train is told apart.
_SPANS: dict[Phase, Key] = {
    "forward": Key("compute", "forward"),
    "backward": Key("compute", "backward"),
    "own backward": Key("compute", "backward"),
    "flush": Key("compute", "end of backward"),
    "step": Key("update", "step"),
    "schedule": Key("pipeline", "the schedule"),
    "save_checkpoint": Key("checkpoint", "save_checkpoint"),
    "load_checkpoint": Key("checkpoint", "load_checkpoint"),
}
_EVALUATION = Key("evaluation", "forward")
_GUARDED = ("forward", "backward", "step")  # where memory can be looked at


class Wiring(Observer):
    """The connections between ``engine`` and ``recorder``.

    Args:
        closed: called when the engine is destroyed.
    """

    def __init__(self, engine: CoreEngine, recorder: Recorder, closed: Callable[[], None]) -> None:
        self._engine, self._recorder, self.close = engine, recorder, closed  # type: ignore[method-assign]
        self._handles: list[_Handle] = []
        engine.events.add(self)
        self._watch_places(engine)
        self._watch_waits(engine)
        self._watch_logs(engine)
        self._listen(Arrival, "waits", staticmethod(self._in_main_thread(_of_copy)))
        self._listen(FileRequest, "waits", staticmethod(self._in_main_thread(_of_file)))
        self._watch_loaders()

    def remove(self) -> None:
        """Everything is as it was."""
        self._engine.events.remove(self)
        while self._handles:
            self._handles.pop().remove()

    def _listen(self, target: Any, name: str, value: Any) -> None:
        self._handles.append(_Listening(target, name, value))

    # -- phases ---------------------------------------------------------------------------------------------------

    def on_phase(
        self, name: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None] | None:
        """A span of what the engine does."""
        recorder = self._recorder
        # A backward of the script's begins where the model's output gets its gradient; one in a forward is part of it.
        if not recorder.on or (name == "own backward" and recorder.phase):
            return None
        key, inside = _SPANS[name], {"own backward": "backward"}.get(name, name)
        if name == "forward" and not (self._engine.training and torch.is_grad_enabled()):
            key, inside = _EVALUATION, ""
        elif name == "forward" and (args or kwargs):
            recorder.add_tokens_of(count_tokens(args, kwargs))
        return self._span(key, inside if name in ("forward", "backward", "own backward") else None, name in _GUARDED)

    @contextmanager
    def _span(self, key: Key, phase: str | None, guarded: bool) -> Iterator[None]:
        recorder = self._recorder
        depth, turn = recorder.depth, recorder.open(recorder.number(key))
        if phase is not None:
            recorder.enter_phase(phase)
        try:
            if guarded:
                with recorder.guard():
                    yield
            else:
                yield
        finally:
            recorder.close_to(depth, turn)
            if phase is not None:
                recorder.phase = ""

    # -- modules --------------------------------------------------------------------------------------------------

    def _watch_places(self, engine: CoreEngine) -> None:
        units = {id(module) for unit in engine.units if unit.name for module in unit.modules}
        for path, module in places_of(engine.module, units).items():
            place = _Place(self._recorder, path)
            self._handles.append(module.register_forward_pre_hook(place.begin))
            self._handles.append(module.register_forward_hook(place.end))

    # -- waits ----------------------------------------------------------------------------------------------------

    def _waits(self, key: Key) -> Waits:
        """Waits are spans of ``key``."""
        recorder, number = self._recorder, self._recorder.number(key)

        @contextmanager
        def span() -> Iterator[None]:
            turn = recorder.open(number)
            yield
            recorder.close(turn)

        return lambda target, method: span() if recorder.on else None

    def _watch_waits(self, engine: CoreEngine) -> None:
        """Where the computation waits for communication streams."""
        streams = {}
        for unit in engine.units:
            for buffer in unit.buffers:
                self._listen(buffer, "waits", self._waits(Key("gather", buffer.labels.weights)))
                streams[buffer.comm_stream] = Key("gather", "weights: the end of what was asked for")
                peers = buffer.gathering.peers
                if peers is not None and peers.waits is None:
                    self._listen(peers, "waits", self._waits(Key("gather", "weights: a meeting of the ranks")))
        for gradient in engine.reducer.buffers:
            key = Key("reduction", "gradients: the end of what was asked for")
            streams.setdefault(gradient.comm_stream, key)
        for stream, key in streams.items():
            if stream.stream is not None:
                self._listen(stream, "waits", self._waits(key))

    def _watch_logs(self, engine: CoreEngine) -> None:
        logs = [axis.log for axis in engine.mesh.axes]
        for unit in engine.units:
            for buffer in unit.buffers:
                logs += (axis.log for axis in (buffer.axis, buffer.gathering.over, buffer.replicas.axis))
        executor = getattr(engine, "executor", None)
        if executor is not None:
            logs.append(executor.links.log)
        observer = _Collectives(self._recorder)
        for log in dict.fromkeys(logs):
            self._listen(log, "observer", observer)

    def _in_main_thread(self, key_of: Callable[[Any], Key | None]) -> Waits:
        """Waits of the script's threads; the key of what is waited for, ``None`` where that is over."""
        recorder = self._recorder

        @contextmanager
        def span(key: Key) -> Iterator[None]:
            turn = recorder.open_collective(recorder.number(key))
            yield
            recorder.close_collective(turn)

        def waits(target: Any, method: str) -> AbstractContextManager[None] | None:
            key = key_of(target) if recorder.on else None
            if key is None or threading.current_thread().name.startswith("ds_hf"):
                return None
            return span(key)

        return waits

    def _watch_loaders(self) -> None:
        """Of whatever script: torch's class is the only place where all loaders come by."""
        recorder, advance = self._recorder, _BaseDataLoaderIter.__next__

        def following(iterator: Any) -> Any:
            if not recorder.on:
                return advance(iterator)
            workers = getattr(iterator, "_num_workers", 0)
            depth, turn = recorder.depth, recorder.open(recorder.number(Key("loader", f"{NEXT_BATCH} {workers}")))
            try:
                return advance(iterator)
            finally:
                recorder.close_to(depth, turn)

        self._listen(_BaseDataLoaderIter, "__next__", following)


def _of_copy(arrival: Any) -> Key | None:
    return None if arrival._event is None else Key("offload", "copies between host and device")


def _of_file(request: Any) -> Key | None:
    if request._over:
        return None
    name = request._path.rpartition("/")[2]
    return Key("offload", f"disk: {name}", "write" if request._write else "read", request._memory.nbytes)


class _Place:
    """Hooks that tell when forward and backward are in a module.

    Forward is a span. Backward goes from where the gradient of the module's output is known to where that of another
    one is; recomputation of a checkpointed module belongs to its backward.
    """

    def __init__(self, recorder: Recorder, path: str) -> None:
        self._recorder = recorder
        self._forward = recorder.number(Key("compute", f"forward of {path}"))
        self._backward = recorder.number(Key("compute", f"backward of {path}"))
        self._opened: list[tuple[int, int]] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        """Before its forward."""
        if torch.compiler.is_compiling():
            return
        recorder = self._recorder
        if recorder.on and recorder.phase == "forward":
            self._opened.append((recorder.depth, recorder.open(self._forward)))
        elif recorder.on and recorder.phase == "backward" and in_backward():
            recorder.enter(self._backward)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After its forward."""
        if torch.compiler.is_compiling():
            return
        recorder = self._recorder
        if not recorder.on or not recorder.phase:
            self._opened.clear()
            return
        if recorder.phase == "forward" and self._opened:
            recorder.close_to(*self._opened.pop())
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._reached)  # type: ignore[no-untyped-call]
                break

    def _reached(self, grad: Tensor) -> None:
        if self._recorder.on and self._recorder.phase == "backward":
            self._recorder.enter(self._backward)
