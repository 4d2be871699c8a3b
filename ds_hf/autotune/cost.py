"""What a setting will need and how long its step will take, before it is launched; corrected by every launch.

Memory: a trace of the model on the meta device (``footprint``), corrected by what was measured in the user's own
setting at the nearest micro-batch. Where the model is not known: the model states of the plan (``zero.estimate``), plus
what a sample's activations were measured to take, plus what was measured beyond both in the user's own setting.
Time: a roofline. Compute as measured for each micro-batch in the user's setting, communication as bytes over measured
bandwidth, the update as elements over measured speed. What the roofline has wrong is learned: a Bayesian regression of
log(measured / predicted) on the values of the axes, which also says how sure it is. Units: bytes, seconds, samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ds_hf.autotune.footprint import Footprint
from ds_hf.autotune.space import CHECKPOINTING, COMPILE, Setting, config_of
from ds_hf.config.load import examine
from ds_hf.config.plan import Placement, StatePlan, plan_states
from ds_hf.engine.zero.estimate import ITEM_NBYTES, ModelSize, StateBytes, estimate_states
from ds_hf.memory import Prediction as Traced
from ds_hf.memory import UnpredictableError

__all__ = ["CostModel", "Prediction", "Survey"]

RECOMPUTE = 4 / 3  # forward again: 1 of 3 parts
COMPILED = 0.75  # of eager compute; measured 0.68 to 0.85 on Llama shapes (docs/performance.md)
HIDDEN = 0.7  # of the communication behind compute, where it runs beside it
HOST_UPDATE = 2e9  # elements a second that one process updates on the host
HOST_COPY = 2e10  # bytes a second between device and host
MARGIN = 1.1  # an estimate this much above the memory is believed
TRACED_MARGIN = 1.05  # the same of a trace: 1.7 % off at most on an H100 (docs/memory.md), and fragments
PRIOR_SPREAD = 0.15  # of log(measured / predicted) for each thing that differs from the user's setting
NOISE = 0.04  # of the same once all of them were launched: what differences do to each other, and noise


@dataclass(frozen=True)
class Survey:
    """What the first trial found: the events "facts" and "survey", and its points.

    Attributes:
        facts, found: the two events.
        points: micro-batch -> (seconds, accumulation, seconds of the update, peak bytes), in the user's setting.
    """

    facts: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    points: dict[int, tuple[float, int, float, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """Of one setting at one micro-batch.

    Attributes:
        seconds: of an optimizer step; ``spread``: standard deviation of its logarithm.
        nbytes: peak on the device.
    """

    seconds: float
    nbytes: int
    spread: float


class CostModel:
    """Predicts settings of one search.

    Args:
        tree: the user's configuration. own: the user's setting.
        memory: bytes of the device, ``None`` where nothing limits it.
        footprint: the model, traced; ``None`` where that is not possible.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        own: Setting,
        survey: Survey,
        memory: int | None,
        footprint: Footprint | None = None,
    ) -> None:
        self.tree, self.own, self.survey, self.memory = tree, own, survey, memory
        self.footprint = footprint
        facts = survey.facts
        self.world = int(facts["world_size"])
        self.size = ModelSize(facts["total"], facts["trainable"], facts["largest_unit"])
        self.bandwidth = float(survey.found.get("bandwidth") or math.inf)
        self.hidden = HIDDEN if facts.get("cuda") else 0.0
        self.activations = {on: self._slope(name) for on, name in ((False, "plain"), (True, "checkpointed"))}
        self.beyond = 0
        self._missed: dict[bool, dict[int, int]] = {False: {}, True: {}}
        self._seen: list[tuple[Setting, float]] = []
        self._names: list[tuple[str, Any]] = []
        self._weights = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        self._plans: dict[str, StatePlan] = {}
        self._calibrate()

    def _slope(self, name: str) -> float | None:
        """Activation bytes of one more sample."""
        peaks = {int(numel): nbytes for numel, nbytes in (self.survey.found.get(name) or {}).items()}
        if len(peaks) < 2:
            return None
        (low, first), *_, (high, last) = sorted(peaks.items())
        return float(max(0.0, (last - first) / (high - low)))

    def _calibrate(self) -> None:
        """What the user's own setting takes beyond the estimate, and beyond the trace at each size measured."""
        for on, name in ((False, "plain"), (True, "checkpointed")):
            for numel, peak in (self.survey.found.get(name) or {}).items():
                self._compare({**self.own, CHECKPOINTING: on}, (int(numel), 1), peak)
        for micro, (_, steps, _, peak) in self.survey.points.items():
            self._compare(self.own, (micro, steps), peak)
        extra = [
            peak - self._estimate(self.own, micro, steps) for micro, (_, steps, _, peak) in self.survey.points.items()
        ]
        if extra:
            self.beyond = int(np.median(extra))

    # -- memory ---------------------------------------------------------------------------------------------------

    def plan(self, setting: Setting) -> StatePlan:
        """The state plan of a setting."""
        key = repr(sorted(setting.items(), key=lambda item: item[0]))
        if key not in self._plans:
            self._plans[key] = plan_states(examine(config_of(self.tree, setting), world=None, allow_auto=True))
        return self._plans[key]

    def states(self, setting: Setting, accumulation: int) -> StateBytes:
        """Bytes of the model states of one rank."""
        return estimate_states(
            self.plan(setting), self.size, self.world, module_dtype=self._dtype, accumulates=accumulation > 1
        )

    @property
    def _dtype(self) -> str:
        dtype = str(self.survey.facts.get("module_dtype"))
        return dtype if dtype in ITEM_NBYTES else "float32"

    def _estimate(self, setting: Setting, micro: int, accumulation: int) -> int:
        slope = self.activations.get(self._checkpoints(setting))
        return self.states(setting, accumulation).device + int((slope or 0.0) * micro)

    def _checkpoints(self, setting: Setting) -> bool:
        return bool(setting.get(CHECKPOINTING, self.survey.facts.get("checkpointing", False)))

    def _compare(self, setting: Setting, size: tuple[int, int], peak: int) -> None:
        traced = self._traced(setting, *size)
        if traced is not None:
            self._missed[self._checkpoints(setting)][size[0]] = peak - self._device(traced)

    def _traced(self, setting: Setting, micro: int, accumulation: int) -> Traced | None:
        """By the trace; ``None`` where there is none."""
        if self.footprint is None:
            return None
        on = self._checkpoints(setting)
        tree = {name: value for name, value in config_of(self.tree, setting).items() if name != "$schema"}
        try:
            return self.footprint.predict(tree, micro, accumulation, checkpointing=on)
        except UnpredictableError:
            return None

    def _device(self, traced: Traced) -> int:
        """What a trial's meter counts: on a GPU what the allocator holds, without the context and NCCL."""
        if self.survey.facts.get("cuda"):
            return traced.device_peak + traced.outside.get("allocator", 0)
        return traced.device_peak - traced.device.get("workspaces", 0)  # of cuBLAS

    def nbytes(self, setting: Setting, micro: int, accumulation: int) -> int:
        """Peak bytes on the device."""
        traced = self._traced(setting, micro, accumulation)
        if traced is None:
            return max(0, self._estimate(setting, micro, accumulation) + self.beyond)
        missed = self._missed[self._checkpoints(setting)]
        sizes = sorted(missed)
        more = float(np.interp(micro, sizes, [missed[size] for size in sizes])) if sizes else 0.0
        return max(0, self._device(traced) + int(more))

    def cannot_fit(self, setting: Setting, micro: int, accumulation: int) -> bool:
        """Whether the prediction is so far above the memory that nobody need try."""
        return bool(self.why_not(setting, micro, accumulation))

    def why_not(self, setting: Setting, micro: int, accumulation: int) -> str:
        """Why the setting cannot fit, in words; empty where it may."""
        traced = self._traced(setting, micro, accumulation)
        margin = MARGIN if traced is None else TRACED_MARGIN
        need = self.nbytes(setting, micro, accumulation)
        if self.memory is not None and need > margin * self.memory:
            return f"needs {need / 2**30:.2f} GiB at micro-batch {micro}, and there are {self.memory / 2**30:.2f} GiB"
        host = self.survey.facts.get("host_memory")
        if traced is not None and host and self.survey.facts.get("cuda"):
            kept = sum(nbytes for name, nbytes in traced.host.items() if name != "loading")  # it loaded before
            if kept > TRACED_MARGIN * host:
                return f"needs {kept / 2**30:.2f} GiB of host memory, and there are {host / 2**30:.2f} GiB a process"
        return ""

    # -- time -----------------------------------------------------------------------------------------------------

    def predict(self, setting: Setting, micro: int, accumulation: int) -> Prediction:
        """Seconds and bytes of one setting, with what was learned so far."""
        mean, spread = self._correction(setting)
        seconds = self.roofline(setting, micro, accumulation) * math.exp(mean)
        return Prediction(seconds, self.nbytes(setting, micro, accumulation), spread)

    def roofline(self, setting: Setting, micro: int, accumulation: int) -> float:
        """Seconds of a step by the roofline alone."""
        each, boundary = self._communication(setting)
        own_each, _ = self._communication(self.own)
        compute = max(0.3 * self._measured_micro(micro), self._measured_micro(micro) - self._exposed(own_each, 0.0))
        compute *= _ratio(self._checkpoints(setting), self._checkpoints(self.own), RECOMPUTE)
        compute *= _ratio(bool(setting.get(COMPILE)), bool(self.own.get(COMPILE)), COMPILED)
        micro_seconds = compute + self._exposed(each, compute)
        return accumulation * micro_seconds + boundary / self.bandwidth + self._update(setting)

    def _exposed(self, nbytes: float, compute: float) -> float:
        """Seconds of communication that are not behind compute."""
        seconds = nbytes / self.bandwidth
        return max(seconds - self.hidden * compute, seconds * (1 - self.hidden))

    def _communication(self, setting: Setting) -> tuple[float, float]:
        """Bytes that a ring moves for each micro-batch, and once a step."""
        if self.world == 1:
            return 0.0, 0.0
        plan = self.plan(setting)
        share = (self.world - 1) / self.world
        parameter = ITEM_NBYTES[plan.parameters.dtype or self._dtype]
        sent = ITEM_NBYTES[plan.communication_dtype] if plan.communication_dtype else parameter
        weights, gradients = share * self.size.total * parameter, share * self.size.trainable * sent
        reduction = gradients if plan.optimizer.placement is Placement.SHARDED else 2 * gradients
        gathers = 2 * weights if plan.shards_parameters else 0.0
        publish = weights if plan.shards_optimizer and not plan.shards_parameters else 0.0
        if plan.reduces_every_micro_batch:
            return gathers + reduction, publish
        return gathers, reduction + publish

    def _update(self, setting: Setting) -> float:
        """Seconds of the optimizer step."""
        plan, own = self.plan(setting), self.plan(self.own)
        numel = self._owned(plan)
        if plan.optimizer.device == "cpu" and self.survey.facts.get("cuda"):
            return numel / HOST_UPDATE + 6 * numel / HOST_COPY
        measured = [update for _, _, update, _ in self.survey.points.values()]
        base = float(np.median(measured)) if measured else 0.0
        if own.optimizer.device == "cpu" and self.survey.facts.get("cuda"):
            return base * 0.05
        return base * numel / max(1.0, self._owned(own))

    def _owned(self, plan: StatePlan) -> float:
        return self.size.trainable / (self.world if plan.shards_optimizer else 1)

    def _measured_micro(self, micro: int) -> float:
        """Seconds of forward and backward in the user's setting: as measured, or on the line between and beyond."""
        points = sorted(self.survey.points.items())
        if not points:
            return 1e-3 * micro  # nothing of the user's setting fits: only the order counts
        each = {m: max(1e-9, (seconds - update) / steps) for m, (seconds, steps, update, _) in points}
        if micro in each:
            return each[micro]
        sizes = np.array(list(each), dtype=float)
        times = np.array(list(each.values()))
        if micro < sizes[0] or len(sizes) == 1:
            return float(times[0] * max(micro / sizes[0], 0.5))
        if micro > sizes[-1]:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            return float(times[-1] + max(0.0, slope) * (micro - sizes[-1]))
        return float(np.interp(micro, sizes, times))

    # -- learning -------------------------------------------------------------------------------------------------

    def observe(self, setting: Setting, measured: Sequence[tuple[int, int, float]]) -> None:
        """Learn from (micro-batch, accumulation, seconds of a step) measured in ``setting`` by one launch."""
        errors = [math.log(seconds / self.roofline(setting, *size)) for *size, seconds in measured]
        if errors and self.features(setting):
            self._seen.append((setting, float(np.mean(errors))))
            self._fit()

    def _fit(self) -> None:
        """Bayesian linear regression of the errors on what differs from the user's setting."""
        self._names = sorted({name for setting, _ in self._seen for name in self.features(setting)}, key=repr)
        rows = [self._row(setting)[0] for setting, _ in self._seen]
        matrix, errors = np.array(rows), np.array([error for _, error in self._seen])
        precision = matrix.T @ matrix / NOISE**2 + np.eye(len(self._names)) / PRIOR_SPREAD**2
        self._covariance = np.linalg.inv(precision)
        self._weights = self._covariance @ (matrix.T @ errors) / NOISE**2

    def _row(self, setting: Setting) -> tuple[list[float], int]:
        """What of the setting was launched before, and the number of its features that were not."""
        features = self.features(setting)
        row = [float(name in features) for name in self._names]
        return row, len(features.difference(self._names))

    def features(self, setting: Setting) -> set[tuple[str, Any]]:
        """What differs from the user's setting."""
        return {(name, value) for name, value in setting.items() if value != self.own.get(name)}

    def _correction(self, setting: Setting) -> tuple[float, float]:
        """Mean and standard deviation of log(measured / roofline)."""
        row, new = self._row(setting)
        known = np.array(row)
        mean = float(known @ self._weights) if row else 0.0
        variance = float(known @ self._covariance @ known) if row else 0.0
        noise = NOISE**2 if row or new else 0.0
        return mean, math.sqrt(variance + new * PRIOR_SPREAD**2 + noise)


def _ratio(on: bool, own: bool, factor: float) -> float:
    return 1.0 if on == own else factor if on else 1 / factor
