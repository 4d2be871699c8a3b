"""What a learning-rate search found, as one value: kept as JSON, drawn by ``ds_hf.autotune.lr``, given to users."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_hf.lr.confirm import Decision, PlannedRun, RunResult
from ds_hf.lr.curves import Sweep
from ds_hf.lr.rules import Landmarks
from ds_hf.lr.schedules import Advice, advise

__all__ = ["LrResult"]


@dataclass(frozen=True)
class LrResult:
    """Attributes:
    lr: the suggestion, the peak of a schedule with warm-up and decay.
    interval: from where learning begins to where training breaks.
    near: rates whose confirming runs did nearly as well as the best; ``lr`` itself when there were none.
    reason: why, in a sentence.
    marks: what the range test alone shows, with the rules of fastai (``valley``) and Lightning (``steepest``).
    sweeps, runs: everything measured.
    optimizer: class name. cycles_momentum: whether it has Adam's betas, which 1Cycle moves.
    total_steps: updates of the training to come, when known; shapes the schedules.
    updates: optimizer updates that the search took. seconds: its wall time.
    notes: what else to know, such as that there were too few batches for the search that was asked for.
    """

    lr: float
    interval: tuple[float, float]
    near: tuple[float, float]
    reason: str
    marks: Landmarks
    sweeps: tuple[Sweep, ...]
    runs: tuple[RunResult, ...]
    optimizer: str
    cycles_momentum: bool
    total_steps: int | None
    updates: int
    seconds: float
    notes: tuple[str, ...] = ()

    def advice(self) -> list[Advice]:
        """The suggestion as DeepSpeed's schedules and as arguments of HuggingFace's Trainer."""
        return advise(self.lr, self.total_steps, cycles_momentum=self.cycles_momentum)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the schedules spelt out."""
        return {
            "lr": self.lr,
            "interval": list(self.interval),
            "near": list(self.near),
            "reason": self.reason,
            "marks": asdict(self.marks),
            "schedules": [asdict(advice) for advice in self.advice()],
            "optimizer": self.optimizer,
            "cycles_momentum": self.cycles_momentum,
            "total_steps": self.total_steps,
            "updates": self.updates,
            "seconds": round(self.seconds, 2),
            "notes": list(self.notes),
            "sweeps": [sweep.to_dict() for sweep in self.sweeps],
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LrResult:
        """What ``to_dict`` gave.

        Raises:
            KeyError, IndexError, TypeError, ValueError, ArithmeticError, AttributeError: it is something else.
        """
        runs = (
            RunResult(
                PlannedRun(float(run["lr"]), int(run["steps"]), int(run["seed"])),
                float("inf" if run["loss"] is None else run["loss"]),
            )
            for run in values["runs"]
        )
        unknown = {"steepest", "valley"}  # what their rules may not find
        marks = {
            key: None if value is None and key in unknown else float(value) for key, value in values["marks"].items()
        }
        total = values["total_steps"]
        found = cls(
            lr=float(values["lr"]),
            interval=(float(values["interval"][0]), float(values["interval"][1])),
            near=(float(values["near"][0]), float(values["near"][1])),
            reason=str(values["reason"]),
            marks=Landmarks(**{**marks, "bounded": bool(marks["bounded"])}),  # type: ignore[arg-type]
            sweeps=tuple(map(Sweep.from_dict, values["sweeps"])),
            runs=tuple(runs),
            optimizer=str(values["optimizer"]),
            cycles_momentum=bool(values["cycles_momentum"]),
            total_steps=None if total is None else int(total),
            updates=int(values["updates"]),
            seconds=float(values["seconds"]),
            notes=tuple(map(str, values.get("notes", ()))),
        )
        if not (0 < found.lr < math.inf and (found.total_steps is None or 0 < float(found.total_steps) < math.inf)):
            raise ValueError(f"a rate of {found.lr:g} for {found.total_steps} steps")
        rates = [*found.interval, *found.near, *(run.run.lr for run in found.runs)]
        rates += [lr for sweep in found.sweeps for lr in (*sweep.lrs, *sweep.held_out_lrs)]
        if not found.reason or not all(0 < lr < math.inf for lr in rates):
            raise ValueError("a learning rate that is none, or no reason")
        return found

    @classmethod
    def of(cls, marks: Landmarks, decision: Decision | None, **measured: Any) -> LrResult:
        """From the range test and, if there were confirming runs, what they decided."""
        if decision is None:
            lr = min(marks.best, marks.limit / 2)
            decision = Decision(lr, lr, lr, "lowest held-out loss of the range test, without confirming runs")
        interval = (min(marks.low, decision.lr), max(marks.limit, decision.lr))
        return cls(decision.lr, interval, (decision.low, decision.high), decision.reason, marks, **measured)
