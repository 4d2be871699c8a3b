"""Puts a recorder on a finished engine, and takes it off again.

Methods of the engine's own objects are replaced on these objects, and hooks put on its modules; so without a report
there is nothing to ask for on the way of a step. Three things belong to the process and not to the engine: the class of
the logs of collectives, torch's DataLoader, and the waits for copies and files. They get their methods back with
``Wiring.remove``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_hf.engine.comm.log import CollectiveLog, Entry
from ds_hf.engine.comm.message_log import MessageLog
from ds_hf.engine.model_flops import count_tokens
from ds_hf.engine.offload.aio import Request
from ds_hf.engine.offload.link import Arrival
from ds_hf.engine.report.recorder import Recorder
from ds_hf.engine.report.spans import NEXT_BATCH, Key, kind_of
from ds_hf.engine.zero.buffer import BufferState, FlatBuffer
from ds_hf.engine.zero.hooks import in_backward, tensors_in

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Wiring", "places_of"]

MOST_PLACES = 1024


class _Handle(Protocol):
    def remove(self) -> None: ...


class _Replaced:
    """A method that was replaced, on an object or a class."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self._target, self._name = target, name
        self._had = name in vars(target)
        self._before = vars(target).get(name)
        setattr(target, name, value)

    def remove(self) -> None:
        """What was there is there again."""
        if self._had:
            setattr(self._target, self._name, self._before)
        else:
            delattr(self._target, self._name)


class _LogsBack:
    def __init__(self, log: Any, before: type) -> None:
        self._log, self._before = log, before

    def remove(self) -> None:
        """The log is as it was made."""
        self._log.__class__ = self._before
        for name in ("recorder", "numbers", "_turn"):
            vars(self._log).pop(name, None)


class _RecordedLog(CollectiveLog):
    """A log that also tells the recorder how long its process was in each collective.

    Attributes:
        numbers: of the keys, by entry.
    """

    recorder: Recorder
    numbers: dict[Entry, int]
    _turn: int

    def __enter__(self) -> None:
        super().__enter__()
        recorder = self.recorder
        if recorder.on:
            self._turn = recorder.open_collective(self._key())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.recorder.on:
            self.recorder.close_collective(self._turn)
        super().__exit__(kind, error, trace)

    def waiting(self, wait: Callable[[], Any]) -> Callable[[], None]:
        recorder, inner = self.recorder, super().waiting(wait)
        if not recorder.on:
            return inner
        key = recorder.number(
            recorder.keys[self._key()]._replace(operation=f"wait for {self.entries[-1][0]}", nbytes=0)
        )

        def call() -> None:
            turn = recorder.open_collective(key)
            inner()
            recorder.close_collective(turn)

        return call

    def _key(self) -> int:
        """Of the latest entry."""
        entry = self.entries[-1]
        found = self.numbers.get(entry)
        if found is None:
            operation, what, numel, dtype = entry
            nbytes = numel * getattr(torch, dtype).itemsize if dtype else 0
            nbytes *= self.world_size if operation == "reduce-scatter" else 1  # noted is what comes out
            kind = kind_of(operation, what, self.name)
            found = self.numbers[entry] = self.recorder.number(Key(kind, what, operation, nbytes, self.world_size))
        return found


class _RecordedMessages(MessageLog):
    """Waits for messages of other stages are the bubbles of a pipeline."""

    recorder: Recorder

    @contextmanager
    def awaiting(self, peer: int) -> Iterator[None]:
        recorder = self.recorder
        with super().awaiting(peer):
            turn = recorder.open(recorder.number(Key("pipeline", f"rank {peer}"))) if recorder.on else -1
            yield
            recorder.close(turn)


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


class Wiring:
    """The connections between ``engine`` and ``recorder``."""

    def __init__(self, engine: CoreEngine, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[_Handle] = []
        self._watch_phases(engine)
        self._watch_places(engine)
        self._watch_waits(engine)
        self._watch_logs(engine)
        self._watch_others()

    def remove(self) -> None:
        """Everything is as it was."""
        while self._handles:
            self._handles.pop().remove()

    def before(self, target: Any, name: str, first: Callable[[], None]) -> None:
        """Have ``first`` called before a method of ``target``."""
        inner = getattr(target, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            first()
            return inner(*args, **kwargs)

        self._replace(target, name, call)

    def _replace(self, target: Any, name: str, value: Any) -> None:
        self._handles.append(_Replaced(target, name, value))

    def _within(self, target: Any, name: str, key: Key, *, phase: str = "", guarded: bool = False) -> None:
        """Calls of a method are spans of ``key``; where they are ``guarded``, memory can be looked at in them."""
        recorder, inner, number = self._recorder, getattr(target, name), self._recorder.number(key)

        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            given = (owner, *args) if isinstance(target, type) else args
            if not recorder.on:
                return inner(*given, **kwargs)
            depth, turn = recorder.depth, recorder.open(number)
            if phase:
                recorder.enter_phase(phase)
            try:
                if guarded:
                    with recorder.guard():
                        return inner(*given, **kwargs)
                return inner(*given, **kwargs)
            finally:
                recorder.close_to(depth, turn)
                if phase:
                    recorder.phase = ""

        # A method still: torch's schedulers ask that of an optimizer for its function.
        self._replace(target, name, call if isinstance(target, type) else MethodType(call, target))

    # -- phases ---------------------------------------------------------------------------------------------------

    def _watch_phases(self, engine: CoreEngine) -> None:
        recorder = self._recorder
        executor: Any = getattr(engine, "executor", None)
        self._within(engine, "backward", Key("compute", "backward"), phase="backward", guarded=True)
        self._within(engine, "step", Key("update", "step"), guarded=True)
        assert engine.optimizer is not None
        self._within(engine.optimizer, "step", Key("update", "step"))
        for name in ("save_checkpoint", "load_checkpoint"):
            self._within(engine, name, Key("checkpoint", name))
        self._within(engine.hooks, "flush", Key("compute", "end of backward"))
        self._watch_own_backward(engine)
        forward = engine.forward
        number, other = recorder.number(Key("compute", "forward")), recorder.number(Key("evaluation", "forward"))

        def run(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return forward(*args, **kwargs)
            trains = engine.training and torch.is_grad_enabled()
            if trains:
                recorder.add_tokens_of(count_tokens(args, kwargs))
            depth, turn = recorder.depth, recorder.open(number if trains else other)
            recorder.enter_phase("forward" if trains else "")
            try:
                with recorder.guard():
                    return forward(*args, **kwargs)
            finally:
                recorder.close_to(depth, turn)
                recorder.phase = ""

        self._replace(engine, "forward", run)
        if executor is not None:
            self._watch_stages(executor)

    def _watch_stages(self, executor: Any) -> None:
        recorder, computing = self._recorder, executor._computing
        numbers = {phase: recorder.number(Key("compute", phase)) for phase in ("forward", "backward")}

        @contextmanager
        def run(phase: str) -> Iterator[None]:
            if not recorder.on:
                with computing(phase):
                    yield
                return
            depth, turn = recorder.depth, recorder.open(numbers[phase])
            recorder.enter_phase(phase)
            try:
                with computing(phase):
                    yield
            finally:
                recorder.close_to(depth, turn)
                recorder.phase = ""

        self._replace(executor, "_computing", run)
        self._within(executor, "train", Key("pipeline", "the schedule"))
        log = executor.links.log
        log.recorder = recorder
        self._handles.append(_LogsBack(log, type(log)))
        log.__class__ = _RecordedMessages

    def _watch_own_backward(self, engine: CoreEngine) -> None:
        """A ``loss.backward()`` of one's own: it begins where the model's output gets its gradient."""
        recorder, hooks = self._recorder, engine.hooks
        queue, over = hooks._queue_flush, hooks._flush_callback
        number = recorder.number(Key("compute", "backward"))
        opened: list[tuple[int, int]] = []

        def begin() -> None:
            if recorder.on and not hooks.driven and not hooks._flush_queued and not recorder.phase:
                opened[:] = [(recorder.depth, recorder.open(number))]
                recorder.enter_phase("backward")
            queue()

        def end() -> None:
            over()
            while opened:
                recorder.close_to(*opened.pop())
                recorder.phase = ""

        self._replace(hooks, "_queue_flush", begin)
        self._replace(hooks, "_flush_callback", end)

    # -- modules --------------------------------------------------------------------------------------------------

    def _watch_places(self, engine: CoreEngine) -> None:
        units = {id(module) for unit in engine.units if unit.name for module in unit.modules}
        for path, module in places_of(engine.module, units).items():
            place = _Place(self._recorder, path)
            self._handles.append(module.register_forward_pre_hook(place.begin))
            self._handles.append(module.register_forward_hook(place.end))

    # -- waits ----------------------------------------------------------------------------------------------------

    def _watch_waits(self, engine: CoreEngine) -> None:
        """Where the computation waits for communication streams."""
        streams = set()
        peers = set()
        for unit in engine.units:
            for buffer in unit.buffers:
                self._watch_gather(buffer)
                streams.add((buffer.comm_stream, "gather", "weights"))
                if buffer.peers is not None:
                    peers.add(buffer.peers)
        for gradient in engine.reducer.buffers:
            streams.add((gradient.comm_stream, "reduction", "gradients"))
        for stream, kind, what in streams:
            if stream.stream is not None:
                for name in ("join", "settle"):
                    self._within(stream, name, Key(kind, f"{what}: the end of what was asked for"))
        for each in peers:
            self._within(each, "meet_on_main", Key("gather", "weights: a meeting of the ranks"))

    def _watch_gather(self, buffer: FlatBuffer) -> None:
        recorder, inner = self._recorder, buffer.gather
        number = recorder.number(Key("gather", buffer.labels.weights))

        def gather() -> None:
            if not recorder.on or buffer.state is BufferState.GATHERED:
                return inner()
            turn = recorder.open(number)
            inner()
            return recorder.close(turn)

        self._replace(buffer, "gather", gather)

    def _watch_logs(self, engine: CoreEngine) -> None:
        axes = {id(axis.log): axis for axis in engine.mesh.axes}
        for unit in engine.units:
            for buffer in unit.buffers:
                for axis in (buffer.axis, buffer.gathered_over, buffer.replicas.axis):
                    axes.setdefault(id(axis.log), axis)
        for axis in axes.values():
            log: Any = axis.log
            if type(log) is CollectiveLog:
                vars(log).update(recorder=self._recorder, numbers={}, _turn=-1)
                self._handles.append(_LogsBack(log, CollectiveLog))
                log.__class__ = _RecordedLog

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

        self._replace(_BaseDataLoaderIter, "__next__", following)

    def _watch_others(self) -> None:
        """What belongs to the process: the loaders, copies between host and device, files."""
        recorder = self._recorder
        self._watch_loaders()

        def recorded(inner: Callable[[Any], Any], key_of: Callable[[Any], Key | None]) -> Callable[[Any], Any]:
            def wait(self: Any) -> Any:
                key = key_of(self) if recorder.on else None
                if key is None or threading.current_thread().name.startswith("ds_hf"):
                    return inner(self)
                turn = recorder.open_collective(recorder.number(key))
                found = inner(self)
                recorder.close_collective(turn)
                return found

            return wait

        def of_copy(arrival: Any) -> Key | None:
            return None if arrival._event is None else Key("offload", "copies between host and device")

        def of_file(request: Any) -> Key | None:
            if request._over:
                return None
            name = request._path.rpartition("/")[2]
            return Key("offload", f"disk: {name}", "write" if request._write else "read", request._memory.nbytes)

        self._replace(Arrival, "on_host", recorded(Arrival.on_host, of_copy))
        self._replace(Arrival, "on_stream", recorded(Arrival.on_stream, of_copy))
        self._replace(Request, "wait", recorded(Request.wait, of_file))


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
