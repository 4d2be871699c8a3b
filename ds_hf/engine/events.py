"""What an engine tells those that watch it: monitors, timers, reports, probes. Nothing else stands between the two: an
observer listens, and replaces no method.

An engine has one ``Events``. It says in which phase it is, what the loss of a micro-batch was, whether a step was
applied, and that one is over. Where no observer listens a phase costs a look at one attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Literal, Protocol, TypeVar, cast

from torch import Tensor

from ds_hf.errors import DsHfError

__all__ = ["Events", "Interceptor", "Observer", "Phase", "Waits", "told"]

# Phases of an engine; a pipeline has forwards and backwards of its stage inside its schedule. "own backward" is a
# ``loss.backward()`` that is not the engine's, "flush" the end of either, when the last gradients are reduced.
Phase = Literal[
    "forward", "backward", "own backward", "flush", "step", "schedule", "save_checkpoint", "load_checkpoint"
]
_NOTHING = nullcontext()
# Of an object in which its process or its device waits, and the method: what is to be around the wait, if anything.
Waits = Callable[[Any, str], AbstractContextManager[Any] | None]
F = TypeVar("F", bound=Callable[..., Any])


def told(method: F) -> F:
    """A method that waits. ``waits`` of its object or class, ``None`` where nothing listens, is asked each time."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.waits is None:
            return method(self, *args, **kwargs)
        with self.waits(self, method.__name__) or _NOTHING:
            return method(self, *args, **kwargs)

    return cast(F, run)


class Observer:
    """Listens to an engine. What a subclass does not define it does not hear, and the engine does not call."""

    def on_phase(
        self, name: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """The engine enters a phase: what is to be around it, if anything.

        Args:
            args, kwargs: of the call; empty where the phase is none.
        """

    def on_loss(self, loss: Tensor, factor: float = 1.0) -> None:
        """``loss`` (0-dim, any floating dtype) times ``factor`` is a micro-batch's part of the coming step: its loss
        divided by the accumulation steps. A pipeline tells the mean of a batch once, on every stage; of a
        ``loss.backward()`` without ``engine.scale`` nothing is heard. Asking for the number waits for the device.
        """

    def on_outcome(self) -> None:
        """It is known whether the last step was applied: at its end, or on a GPU as late as the next one."""

    def close(self) -> None:
        """The engine is being destroyed."""


class Interceptor(Protocol):
    """Stands between the script and its engine: it decides what calls of forward, backward and step do."""

    def call(self, name: Phase, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """``method(*args, **kwargs)`` is what the engine would do. What the engine is made to do inside is its own."""


class Events:
    """The events of one engine.

    Attributes:
        observers: in the order in which they were added; the first is outermost.
        on_phase, on_loss, on_outcome: the methods of those that have one, for the engine to call.
        step_hooks: called with the engine after each optimizer step, also one that was skipped; users may append
            theirs.
        watched: something listens to phases, or intercepts them.
    """

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.step_hooks: list[Callable[[Any], None]] = []
        self.watched = False
        self._interceptor: Interceptor | None = None
        self._intercepting = False
        self.on_phase: list[Any] = []
        self.on_loss: list[Callable[[Tensor, float], None]] = []
        self.on_outcome: list[Callable[[], None]] = []

    def add(self, observer: Observer) -> None:
        """Let ``observer`` listen from here on."""
        self.observers.append(observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """It hears nothing more; in the middle of a phase it still sees its end."""
        if observer in self.observers:
            self.observers.remove(observer)
            self._sort()

    def _sort(self) -> None:
        for name in ("on_phase", "on_loss", "on_outcome"):
            heard = [each for each in self.observers if getattr(type(each), name) is not getattr(Observer, name)]
            setattr(self, name, [getattr(each, name) for each in heard])
        self.watched = bool(self.on_phase) or self._interceptor is not None

    def intercept(self, interceptor: Interceptor | None) -> None:
        """Let ``interceptor`` stand before the engine, or none.

        Raises:
            DsHfError: another one does.
        """
        if interceptor is not None and self._interceptor is not None:
            raise DsHfError(
                f"{type(self._interceptor).__name__} and {type(interceptor).__name__} both want to run this engine's "
                "steps: the autotuner and the LR finder measure one after the other"
            )
        self._interceptor = interceptor
        self._sort()

    @property
    def interceptor(self) -> Interceptor | None:
        """What stands before the engine."""
        return self._interceptor

    # -- what the engine says -------------------------------------------------------------------------------------

    def phase(self, name: Phase, /, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Around a phase."""
        if not self.on_phase:
            return _NOTHING
        stack = ExitStack()
        try:
            for listen in self.on_phase:
                around = listen(name, args, kwargs)
                if around is not None:
                    stack.enter_context(around)
        except BaseException:
            stack.close()
            raise
        return stack

    def run(self, name: Phase, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A phase that is a call of the engine's: of ``method``, or of what stands before it."""
        if self._interceptor is None or self._intercepting:
            return self._observed(name, method, *args, **kwargs)
        self._intercepting = True
        try:
            return self._interceptor.call(name, partial(self._observed, name, method), args, kwargs)
        finally:
            self._intercepting = False

    def _observed(self, name: Phase, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self.phase(name, *args, **kwargs):
            return method(*args, **kwargs)

    def close(self) -> None:
        """Close all observers, the last first, whatever one of them raises."""
        with ExitStack() as last:
            for observer in self.observers:
                last.callback(observer.close)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Steps inside are a probe's: no observer and no hook of a step hears of them."""
        hooks, observers = list(self.step_hooks), self.observers
        self.step_hooks.clear()
        self.observers = []
        self._sort()
        try:
            yield
        finally:
            self.step_hooks[:] = hooks
            self.observers = observers
            self._sort()
