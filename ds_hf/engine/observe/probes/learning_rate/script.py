"""A search inside a user's script, which knows nothing of it: ``DS_HF_LR_PROBE`` names a JSON file that asks for one.

The engine's ``forward``, ``backward`` and ``step`` are intercepted (``Events.intercept``), and an engine that is not
asked pays nothing. At first the calls are only written down, and nothing is trained. If the loss that the script gives
to ``backward`` is what the model returned (or a fixed part of it), the search computes losses from these batches again,
the same for every rate. Otherwise the script's own loop goes on and feeds the search with ever new batches. The process
ends when the search has ended: exit code 0 and the result in the file that the job names, or the error in its place.

The script never comes to save anything. Where its training is over before the search, or it begins to write a model,
the process ends as well and tells how many batches there were: the launcher asks for a shorter search. To search
with them at once was considered: often one process alone saves, while the others wait for it or have ended.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_hf.engine.comm.collectives import all_reduce_max, barrier
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.engine.events import Phase
from ds_hf.engine.observe.probes.learning_rate.feeding import drive, loss_in
from ds_hf.engine.observe.probes.learning_rate.probe import Deadline, Fed, Search, Want, search
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import logger
from ds_hf.lr import LrOptions, LrResult
from ds_hf.lr.budget import for_batches
from ds_hf.measure.saving import LR_ENV, SaveGuard, leave
from ds_hf.printable import harmless
from ds_hf.regular_files import read_object

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["attach"]

ENOUGH_CALLS = 4  # micro-batches that show what one takes
READING = 0.2  # of the time that is left
ALIKE = 1e-3  # how far losses of script and model may differ in ratio


def attach(engine: CoreEngine) -> None:
    """Do what the environment asks: usually nothing. Engines without an optimizer are passed over.

    Raises:
        ConfigError: the job cannot be read.
    """
    path = os.environ.get(LR_ENV)
    if not path or engine.optimizer is None:
        return
    try:
        job = read_object(path)
        deadline = Deadline(float(job.get("deadline", math.inf)))
        script = _Script(engine, LrOptions(**job["options"]), Path(job["result"]), Path(job["progress"]), deadline)
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{LR_ENV} names a job that cannot be read ({error!s:.300}): it is for ds-hf lr-find; unset it",
            source=path[:300],
        ) from harmless(error)
    engine.events.intercept(script)


@dataclass(frozen=True)
class _Held:
    """A tensor of a batch in host memory, and where the model wants it."""

    value: Tensor
    device: torch.device


@dataclass(frozen=True)
class _Call:
    """One micro-batch as the script gave it.

    Attributes:
        args, kwargs: of the engine, with ``_Held`` for tensors.
        factor: loss given to ``backward`` over the loss that the model returned.
        backward: further arguments of ``backward``.
        share: of the loss in that of the whole update.
    """

    args: Any
    kwargs: Any
    factor: float
    backward: Mapping[str, Any]
    share: float


class _Script:
    """Stands between the script and its engine.

    It records until it has enough, then either replays or lets the script feed.
    """

    def __init__(
        self, engine: CoreEngine, options: LrOptions, result: Path, progress: Path, deadline: Deadline
    ) -> None:
        self.deadline = deadline
        self.began = 0.0  # when the first micro-batch was read
        self.engine, self.options, self.result, self.progress = engine, options, result, progress
        self.steps = engine.accumulation.steps
        self.calls: list[_Call] = []
        self.forwards: list[tuple[Any, Any, Tensor | None]] = []  # since the last backward
        self.recording = True
        self.feeding: Search | None = None
        self.ended = False
        self.micro_batches = 0
        self.guard = SaveGuard(self._before_saving)
        atexit.register(self._ended_early, None)

    # -- in place of the engine ------------------------------------------------------------------------------------

    def call(self, name: Phase, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Forwards are noted, backwards end micro-batches, and the search makes the steps."""
        if name == "forward":
            return self.forward(method, args, kwargs)
        if name == "backward":
            return self.backward(*args, **kwargs)
        return None if name == "step" else method(*args, **kwargs)

    def forward(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Keep a copy of what the model was given, and of the loss that it returned."""
        output = method(*args, **kwargs)
        if self.recording and torch.is_grad_enabled():
            loss = loss_in(output)  # a copy is kept: the Trainer multiplies it in place by the number of processes
            self.forwards.append((*tree_map(_held, (args, kwargs)), None if loss is None else loss.detach().clone()))
        return output

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        """One micro-batch of the script is complete."""
        with self._reported():
            share = 1 / self.steps if scale_wrt_gas else 1.0
            further = {"retain_graph": retain_graph, "scale_wrt_gas": scale_wrt_gas, **kwargs}
            self.micro_batches += 1
            if self.micro_batches == 1:
                self.guard.watch_files()
            if self.feeding is not None:
                self._feed(Fed(loss, further, share))
                return loss
            self._record(loss, further, share)
            if not self._can_replay():
                self._tell({"phase": "feed", "why": "the loss is not what the model returns"})
                self.recording = False
                self.feeding = search(self.engine, self.options, self._tell, self.deadline)
                next(self.feeding)
            elif len(self.calls) == self.options.batches * self.steps:
                self._replay()
        return loss

    # -- recording ----------------------------------------------------------------------------------------------------

    def _record(self, loss: Tensor, further: Mapping[str, Any], share: float) -> None:
        engine = self.engine
        factor = math.nan
        if len(self.forwards) == 1 and self.forwards[0][2] is not None:
            returned, given = float(self.forwards[0][2]), float(loss.detach())
            factor = 1.0 if returned == given else given / returned if returned else math.nan
        args, kwargs, _ = self.forwards[-1] if self.forwards else ((), {}, None)
        self.forwards.clear()
        self.calls.append(_Call(args, kwargs, factor, further, share))
        engine.backward(loss, **further)  # units wait for it
        assert engine.optimizer is not None
        engine.optimizer.reducer.clear()
        if len(self.calls) == 1:
            self.began = self.deadline.now()
        elif len(self.calls) == ENOUGH_CALLS and math.isfinite(self.deadline.at):
            self._read_fewer()
        self._tell({"phase": "record", "step": len(self.calls), "of": self.options.batches * self.steps})

    def _read_fewer(self) -> None:
        """Reading takes a small share of the time that is left; as much on every rank."""
        each = (self.deadline.now() - self.began) / (len(self.calls) - 1)
        left, each = self.deadline.of_all(self.engine, each)
        least = -(-(len(self.calls) + 1) // self.steps) + 1
        batches = max(least, int(READING * left / max(each * self.steps, 1e-9)))
        if batches < self.options.batches and (fewer := for_batches(self.options, batches)) is not None:
            self.options = fewer

    def _can_replay(self) -> bool:
        """Whether the model's own loss will do, on every rank. Asked at the first micro-batch and at the last."""
        if len(self.calls) not in (1, self.options.batches * self.steps):
            return True
        middle = statistics.median(call.factor for call in self.calls)
        alike = all(abs(call.factor - middle) <= ALIKE * abs(middle) for call in self.calls)  # False for nan
        differs = torch.tensor(0 if alike and middle else 1, device=compute_device())
        return not int(all_reduce_max(differs, self.engine.mesh.world, "whether losses can be computed again"))

    # -- searching ----------------------------------------------------------------------------------------------------

    def _replay(self) -> NoReturn:
        self.recording = False
        train = self.options.train_batches * self.steps

        def feed(want: Want) -> Fed:
            call = self.calls[(train if want.held_out else 0) + want.batch * self.steps + want.micro]
            args, kwargs = tree_map(_live, (call.args, call.kwargs))
            with torch.set_grad_enabled(not want.held_out):
                loss = loss_in(self.engine(*args, **kwargs))
            assert loss is not None
            return Fed(loss if call.factor == 1 else loss * call.factor, call.backward, call.share, want.held_out)

        self._finish(drive(search(self.engine, self.options, self._tell, self.deadline), feed))

    def _feed(self, fed: Fed) -> None:
        assert self.feeding is not None
        try:
            self.feeding.send(fed)
        except StopIteration as end:
            self._finish(end.value)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, result: LrResult) -> NoReturn:
        self._write({"result": result.to_dict()})
        barrier(self.engine.mesh.world)
        leave(0)

    def _reported(self) -> _Reported:
        return _Reported(self._write)

    def _before_saving(self, what: str) -> None:
        """Nothing is saved: before the first batch the script goes on without it, afterwards it ends."""
        if self.ended:
            leave(1)
        if not self.micro_batches:
            logger.warning("%s is left out: ds-hf lr-find saves nothing", what)
            return
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, StopIteration | OSError):
            traceback.print_exception(error)  # what saves here is a `finally` or an `except` of the script
            leave(1)
        self._ended_early(what)
        leave(0)

    def _ended_early(self, before: str | None) -> None:
        """There were fewer batches than the search needs, before what the script did next or (``None``) ended."""
        short = {"micro_batches": self.micro_batches, "accumulation": self.steps, "before": before,
                 "feeding": self.feeding is not None}  # fmt: skip
        self._write({"short": short})

    def _write(self, content: dict[str, Any]) -> None:
        if self.ended:
            return
        self.ended = True
        if self.engine.mesh.world.rank == 0 or "result" not in content:
            made = self.result.with_suffix(f".{os.getpid()}.part")
            made.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            if "result" in content or not self.result.exists():
                os.replace(made, self.result)
            else:
                made.unlink()

    def _tell(self, event: dict[str, Any]) -> None:
        if self.engine.mesh.world.rank == 0:
            with self.progress.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


class _Reported:
    """What is raised inside is written down for the launcher of the script, and goes on."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self.write = write

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, SystemExit):
            text = str(error) if isinstance(error, DsHfError) else f"{type(error).__name__}: {error}"
            self.write({"error": text})


def _held(value: Any) -> Any:
    return _Held(value.detach().to("cpu", copy=True), value.device) if isinstance(value, Tensor) else value


def _live(value: Any) -> Any:
    return value.value.to(value.device) if isinstance(value, _Held) else value
