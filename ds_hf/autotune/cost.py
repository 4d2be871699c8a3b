"""What a setting will need and how long its step will take, before it is launched; corrected by every launch.

Memory: a trace of the model on the meta device (``footprint``), corrected by what was measured in the user's own
setting at the nearest micro-batch. Where the model is not known: the model states of the plan (``zero.estimate``), plus
what a sample's activations were measured to take, plus what was measured beyond both in the user's own setting.
Time: a roofline. Compute as measured for each micro-batch in the user's setting, divided where more processes share a
sample; communication as bytes over measured bandwidth, the update as elements over measured speed. What the roofline
has wrong is learned: a Bayesian regression of log(measured / predicted) on what differs from the user's setting, which
also says how sure it is. A stage changes communication and the update but no compute, so that it is known beforehand
how much it can matter: as much as the step was seen to do other things than compute. Units: bytes, seconds, samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_hf.autotune.division import division_of
from ds_hf.autotune.options import gib
from ds_hf.autotune.space import (
    ACTIVATIONS,
    CHECKPOINTING,
    CHUNKED_LOSS,
    COMPILE,
    STAGE,
    Setting,
    config_of,
    examined,
    key_of,
)
from ds_hf.config.plan import Placement, StatePlan, plan_states
from ds_hf.engine.zero.estimate import ITEM_NBYTES, ModelSize, StateBytes, estimate_states

if TYPE_CHECKING:  # they import torch, which a page of a report needs not
    from ds_hf.autotune.footprint import Footprint, RefusedError
    from ds_hf.memory import Prediction as Traced

__all__ = ["CostModel", "StepEstimate", "Survey"]

RECOMPUTE = 4 / 3  # forward again: 1 of 3 parts
UNDIVIDED = 0.2  # of compute, which each of several processes of a layer does again; 1.35 B on two H100: 0.16 and 0.22
COMPILED = 0.75  # of eager compute; measured 0.68 to 0.85 on Llama shapes (docs/measurements.md)
MEETING = 1.5e-4  # seconds of a collective amid compute beside its bytes: its start, and the wait for the slowest
TRAVELS = 1.02  # activations to host memory and back, beside the computation
HIDDEN = 0.7  # of the communication behind compute, where it runs beside it
SURPRISE = 3.0  # errors between two searches: more is no chance
HOST_UPDATE = 2e9  # elements a second that one process updates on the host
HOST_COPY = 2e10  # bytes a second between device and host
STATES = 10  # bytes of an element that go up and down for the GPU to update it
MARGIN = 1.1  # an estimate this much above the memory is believed
TRACED_MARGIN = 1.05  # the same of a trace: 1.7 % off at most on an H100 (docs/memory.md), and fragments
PRIOR_SPREAD = 0.15  # of log(measured / predicted) for each thing that differs from the user's setting
LEAST_SPREAD = 0.02  # of the same for what changes no compute: kernels beside a collective are a little slower
INTERPLAY = 0.02  # of the same once all of them were launched: what they do to each other

_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads")
PARAMETERS, GRADIENTS, OPTIMIZER = "shards parameters", "reduces every micro-batch", "shards the optimizer"

Feature = tuple[str, Any]


@dataclass(frozen=True)
class Survey:
    """What the first trial found: the events "facts" and "survey", and its points.

    Attributes:
        facts, found: the two events.
        points: micro-batch -> (seconds, accumulation, seconds of the update, peak bytes), in the user's setting.
        split: the event "split": what the time of a step is made of, in the user's setting; empty where not measured.
    """

    facts: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    points: dict[int, tuple[float, int, float, int]] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEstimate:
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
        self.division = division_of(facts)
        self.bandwidth = float(survey.found.get("bandwidth") or math.inf)
        self.hidden = HIDDEN if facts.get("cuda") else 0.0
        self.activations = {on: self._slope(name) for on, name in ((False, "plain"), (True, "checkpointed"))}
        self.beyond = 0
        self._missed: dict[bool, dict[int, int]] = {False: {}, True: {}}
        # What differed, its error, its noise, and whether an earlier search saw it.
        self._seen: list[tuple[dict[Feature, float], float, float, bool]] = []
        self._names: list[Feature] = []
        self._weights = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        self._plans: dict[str, tuple[StatePlan, int, bool]] = {}
        self._rooflines: dict[tuple[str, int, int], float] = {}
        self._states: dict[tuple[str, bool], StateBytes] = {}
        self._lengths: dict[tuple[str, int], int] = {}
        self._features: dict[tuple[str, int, int], dict[Feature, float]] = {}
        self._corrections: dict[tuple[str, int, int], tuple[float, float]] = {}  # until more is learned
        self._earlier: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {}  # (micro, steps) -> seconds, error
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
        return self._read(setting)[0]

    def _read(self, setting: Setting) -> tuple[StatePlan, int, bool]:
        """The state plan of a setting, the stretches of layers that a stage of its pipeline has, and whether tokens are
        divided between cut layers."""
        key = key_of(setting)
        if key not in self._plans:
            config = examined(self.tree, setting)
            own = config.ds_hf
            self._plans[key] = plan_states(config), own.pipeline.chunks, own.tensor_sequence_parallel
        return self._plans[key]

    def _world(self, setting: Setting) -> int:
        """Replicas of a parameter."""
        facts = self.survey.facts
        own, here = self.division, self.division.of(setting)
        return int(facts["world_size"]) * own.tensor * own.pipe // (here.tensor * here.pipe)

    def _size(self, setting: Setting) -> ModelSize:
        """What one process holds of the model before ZeRO divides it, as if all of it were cut."""
        facts, own, here = self.survey.facts, self.division, self.division.of(setting)
        part = own.tensor * own.pipe / (here.tensor * here.pipe)
        return ModelSize(*(int(facts[name] * part) for name in ("total", "trainable", "largest_unit")))

    def states(self, setting: Setting, accumulation: int) -> StateBytes:
        """Bytes of the model states of one rank."""
        key = key_of(setting), accumulation > 1
        if key not in self._states:
            self._states[key] = estimate_states(
                self.plan(setting),
                self._size(setting),
                self._world(setting),
                module_dtype=self._dtype,
                accumulates=accumulation > 1,
                split_masters=bool(self.survey.facts.get("cuda")),
            )
        return self._states[key]

    @property
    def _dtype(self) -> str:
        dtype = str(self.survey.facts.get("module_dtype"))
        return dtype if dtype in ITEM_NBYTES else "float32"

    def _estimate(self, setting: Setting, micro: int, accumulation: int) -> int:
        slope = (self.activations.get(self._checkpoints(setting)) or 0.0) * self._share(setting)
        return self.states(setting, accumulation).device + int(slope * micro)

    def _share(self, setting: Setting) -> float:
        """Of what a process computes of a sample in the user's setting."""
        return self.division.shared / self.division.of(setting).shared

    def _checkpoints(self, setting: Setting) -> bool:
        return bool(setting.get(CHECKPOINTING, self.survey.facts.get("checkpointing", False)))

    def _compare(self, setting: Setting, size: tuple[int, int], peak: int) -> None:
        traced = self._traced(setting, *size)
        if traced is not None:
            self._missed[self._checkpoints(setting)][size[0]] = peak - self._device(traced)

    def _traced(self, setting: Setting, micro: int, accumulation: int) -> Traced | None:
        """By the trace; ``None`` where there is none."""
        found = self._traced_or_refused(setting, micro, accumulation)
        return None if isinstance(found, Exception) else found

    def _traced_or_refused(self, setting: Setting, micro: int, accumulation: int) -> Traced | RefusedError | None:
        if self.footprint is None:
            return None
        from ds_hf.autotune.footprint import RefusedError
        from ds_hf.memory import UnpredictableError

        on = self._checkpoints(setting)
        try:
            return self.footprint.predict(config_of(self.tree, setting), micro, accumulation, checkpointing=on)
        except RefusedError as error:
            return error
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

    def longest(self, setting: Setting, micro: int, accumulation: int, tokens: int, step: int) -> int:
        """Tokens of the longest sequences that are expected to fit, in steps of ``step``; 0 for none.

        Args:
            tokens: of the script's own, which were measured.
        """
        key = key_of(setting), micro
        if key not in self._lengths:
            self._lengths[key] = self._longest(setting, micro, accumulation, tokens, step)
        return self._lengths[key]

    def _longest(self, setting: Setting, micro: int, accumulation: int, tokens: int, step: int) -> int:
        if self.memory is None:
            return tokens
        traced, need = self._traced(setting, micro, accumulation), self.nbytes(setting, micro, accumulation)
        if traced is not None and self.footprint is not None:
            from ds_hf.memory import UnpredictableError

            on, apart = self._checkpoints(setting), max(1, step // self.division.sequence)
            with suppress(UnpredictableError):
                # what a trial's meter does not count, and what the trace does not know
                room = self.memory + traced.device_total - need
                return self.footprint.longest(
                    config_of(self.tree, setting), micro, accumulation, room, apart, checkpointing=on
                )
        each = (self.activations.get(self._checkpoints(setting)) or 0.0) * self._share(setting) * micro / tokens
        return tokens + int((self.memory - need) / each) // step * step if each else tokens

    def cannot_fit(self, setting: Setting, micro: int, accumulation: int) -> bool:
        """Whether a trial is pointless: the prediction is far above the memory, or the engine refuses the setting."""
        return bool(self.why_not(setting, micro, accumulation))

    def why_not(self, setting: Setting, micro: int, accumulation: int) -> str:
        """Why the setting cannot fit, in words; empty where it may."""
        traced = self._traced_or_refused(setting, micro, accumulation)
        if isinstance(traced, Exception):
            return str(traced)
        margin = MARGIN if traced is None else TRACED_MARGIN
        need = self.nbytes(setting, micro, accumulation)
        if self.memory is not None and need > margin * self.memory:
            return f"needs {gib(need)} at micro-batch {micro}, and there are {gib(self.memory)}"
        host = self.survey.facts.get("host_memory")
        if traced is not None and host and self.survey.facts.get("cuda"):
            kept = sum(nbytes for name, nbytes in traced.host.items() if name != "loading")  # it loaded before
            if kept > TRACED_MARGIN * host:
                return f"needs {gib(kept)} of host memory, and there are {gib(host)} a process"
        return ""

    # -- time -----------------------------------------------------------------------------------------------------

    def predict(self, setting: Setting, micro: int, accumulation: int) -> StepEstimate:
        """Seconds and bytes of one setting, with what was learned so far."""
        mean, spread = self._correction(setting, micro, accumulation)
        seconds = self.roofline(setting, micro, accumulation) * math.exp(mean)
        return StepEstimate(seconds, self.nbytes(setting, micro, accumulation), spread)

    def roofline(self, setting: Setting, micro: int, accumulation: int) -> float:
        """Seconds of a step by the roofline alone, which nothing that is learned changes."""
        key = key_of(setting), micro, accumulation
        if key not in self._rooflines:
            self._rooflines[key] = self._roofline(setting, micro, accumulation)
        return self._rooflines[key]

    def _roofline(self, setting: Setting, micro: int, accumulation: int) -> float:
        compute, share = self._own_compute(micro), self._share(setting)
        divides = self.division.of(setting) != self.division
        if divides:
            compute = share * max(0.3 * compute, compute - self._inside(self.own, micro))
            compute *= self._again(setting) / self._again(self.own)
        compute *= _ratio(self._checkpoints(setting), self._checkpoints(self.own), RECOMPUTE)
        compute *= _ratio(bool(setting.get(COMPILE)), bool(self.own.get(COMPILE)), COMPILED)
        compute *= _ratio(bool(setting.get(ACTIVATIONS)), bool(self.own.get(ACTIVATIONS)), TRAVELS)
        compute += self._inside(setting, micro) if divides else 0.0
        compute *= self._waits(setting, accumulation)
        around = self._around(setting, accumulation, compute)
        return accumulation * compute + around + self._update(setting, micro, accumulation)

    def _again(self, setting: Setting) -> float:
        """Times its part that a process computes of layers that several share: each has the norms and residuals."""
        others = self.division.of(setting).tensor - 1
        return 1.0 if self._read(setting)[2] else 1 + UNDIVIDED * others

    def _waits(self, setting: Setting, accumulation: int) -> float:
        """Times what it computes that a stage of a pipeline takes, with its waits for the others (1F1B)."""
        return 1 + (self.division.of(setting).pipe - 1) / (accumulation * self._read(setting)[1])

    def _inside(self, setting: Setting, micro: int) -> float:
        """Seconds of a micro-batch in which processes that share samples exchange them: none is behind compute. In
        each pass over a layer two sums of its hidden states where layers are shared (a gather and a scatter each where
        tokens are divided); queries, keys and values, and what attention gives back, where sequences are."""
        division, facts = self.division.of(setting), self.survey.facts
        config = (facts.get("model") or {}).get("config") or {}
        config = config.get("text_config") or config
        layers, hidden, heads = (config.get(name) for name in _SHAPE)
        if division.shared == 1 or not (layers and hidden and heads):
            return 0.0
        inputs = (self.survey.found.get("inputs") or {}).get("input_ids")
        tokens = inputs[0][-1] * self.division.sequence if inputs else self.survey.found.get("sample_numel", 0)
        tensor, sequence = division.tensor, division.sequence
        moved = 4 * (tensor - 1) / tensor
        moved += 2 * (1 + (config.get("num_key_value_heads") or heads) / heads) * (sequence - 1) / sequence / tensor
        passes = 3 if self._checkpoints(setting) else 2
        seconds = moved * micro * tokens / sequence * hidden * ITEM_NBYTES[self._dtype] / self.bandwidth
        meetings = (4 if self._read(setting)[2] else 2) * (tensor > 1) + 4 * (sequence > 1)
        return float(layers * passes * (seconds + meetings * MEETING))

    def _around(self, setting: Setting, accumulation: int, compute: float) -> float:
        """Seconds of communication in a step that are not behind ``compute`` of a micro-batch."""
        first, each, last = self._communication(setting)
        if accumulation == 1:
            return self._exposed(first + each + last, compute)
        ends = self._exposed(first + each, compute) + self._exposed(each + last, compute)
        return (accumulation - 2) * self._exposed(each, compute) + ends

    def _exposed(self, nbytes: float, compute: float) -> float:
        """Seconds of communication that are not behind compute."""
        seconds = nbytes / self.bandwidth
        return max(seconds - self.hidden * compute, seconds * (1 - self.hidden))

    def _communication(self, setting: Setting) -> tuple[float, float, float]:
        """Bytes that a ring moves beside the first micro-batch (what was updated, which units wait for as they come),
        beside each, and beside the last."""
        world, size = self._world(setting), self._size(setting)
        if world == 1:
            return 0.0, 0.0, 0.0
        plan = self.plan(setting)
        shards, neighbours = (plan.shards(row.over, world) for row in (plan.optimizer, plan.parameters))
        share, near = (shards - 1) / shards, (neighbours - 1) / neighbours
        parameter = ITEM_NBYTES[plan.parameters.dtype or self._dtype]
        sent = ITEM_NBYTES[plan.communication_dtype] if plan.communication_dtype else parameter
        weights, gradients = size.total * parameter, size.trainable * sent
        reduction = share * gradients * (1 if plan.optimizer.placement is Placement.SHARDED else 2)
        reduction += 2 * (1 - shards / world) * gradients / shards  # shards that several have
        gathers = 2 * near * weights if plan.shards_parameters else 0.0
        publish = share * weights if plan.shards_optimizer and not plan.shards_parameters else 0.0
        if plan.shards_parameters and neighbours < shards:
            publish = share * size.trainable * parameter / neighbours  # second shards
        if plan.reduces_every_micro_batch:
            return publish, gathers + reduction, 0.0
        return publish, gathers, reduction

    def _update(self, setting: Setting, micro: int, accumulation: int) -> float:
        """Seconds of the optimizer step."""
        plan, own = self.plan(setting), self.plan(self.own)
        numel = self._owned(setting)
        if plan.optimizer.device == "cpu" and self.survey.facts.get("cuda"):
            traced = self._traced(setting, micro, accumulation)
            streamed = 0.0 if traced is None else traced.streamed_share  # the GPU updates these at the same time
            seconds = max((1 - streamed) / HOST_UPDATE, streamed * STATES / HOST_COPY)
            return seconds * numel + 6 * numel / HOST_COPY
        measured = [update for _, _, update, _ in self.survey.points.values()]
        base = float(np.median(measured)) if measured else 0.0
        if own.optimizer.device == "cpu" and self.survey.facts.get("cuda"):
            return base * 0.05
        return base * numel / max(1.0, self._owned(self.own))

    def _owned(self, setting: Setting) -> float:
        shards = self._world(setting) if self.plan(setting).shards_optimizer else 1
        return self._size(setting).trainable / shards

    def _own_compute(self, micro: int) -> float:
        """Seconds of forward and backward in the user's setting, without waits of stages: as measured, or on the line
        between and beyond."""
        points = sorted(self.survey.points.items())
        if not points:
            return 1e-3 * micro  # nothing of the user's setting fits: only the order counts
        each = {}
        for m, (seconds, steps, update, _) in points:
            whole = max(1e-9, (seconds - update) / steps)
            alone = max(0.3 * whole, whole - self._around(self.own, steps, whole) / steps)
            each[m] = alone / self._waits(self.own, steps)
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

    def observe(
        self, setting: Setting, measured: Sequence[tuple[int, int, float, float]], *, earlier: bool = False
    ) -> None:
        """Learn from what one launch of ``setting`` measured.

        Args:
            measured: micro-batch, accumulation, seconds of a step, standard error of their logarithm; for each size.
            earlier: by another search. All of these are dropped once one of them was launched again and is no longer
                so: then something of the machine has changed.
        """
        if not measured or setting == self.own:
            return
        if earlier:
            self._earlier[key_of(setting)] = {tuple(size): (seconds, error) for *size, seconds, error in measured}
        elif self._contradicts(setting, measured):
            self._seen = [row for row in self._seen if not row[3]]
            self._earlier.clear()
        errors = [math.log(seconds / self.roofline(setting, *size)) for *size, seconds, _ in measured]
        rows = [self.features(setting, micro, steps) for micro, steps, *_ in measured]
        names = {name for row in rows for name in row}
        mean = {name: float(np.mean([row.get(name, 0.0) for row in rows])) for name in names}
        noise = float(np.mean([error for *_, error in measured]))
        self._seen.append((mean, float(np.mean(errors)), math.hypot(INTERPLAY, noise), earlier))
        self._fit()

    def _contradicts(self, setting: Setting, measured: Sequence[tuple[int, int, float, float]]) -> bool:
        """Whether an earlier search measured something else."""
        known = self._earlier.get(key_of(setting), {})
        for *size, seconds, error in measured:
            if tuple(size) in known:
                then, doubt = known[tuple(size)]
                if abs(math.log(seconds / then)) > SURPRISE * math.hypot(error, doubt):
                    return True
        return False

    def _fit(self) -> None:
        """Bayesian linear regression of the errors on what differs from the user's setting."""
        self._names = sorted({name for row, *_ in self._seen for name in row}, key=repr)
        noise = np.array([each for _, _, each, _ in self._seen])
        matrix = np.array([[row.get(name, 0.0) for name in self._names] for row, *_ in self._seen]) / noise[:, None]
        errors = np.array([error for _, error, _, _ in self._seen]) / noise
        prior = np.array([self._spread_of(name) for name in self._names])
        self._covariance = np.linalg.inv(matrix.T @ matrix + np.diag(prior**-2))
        self._weights = self._covariance @ (matrix.T @ errors)
        self._corrections.clear()

    def features(self, setting: Setting, micro: int, accumulation: int) -> dict[Feature, float]:
        """What differs from the user's setting, and how much that weighs: a stage is what it shards, which weighs more
        where the rest of the step takes less time. Shared, not to be changed."""
        key = key_of(setting), micro, accumulation
        if key not in self._features:
            self._features[key] = self._differing(setting, micro, accumulation)
        return self._features[key]

    def _differing(self, setting: Setting, micro: int, accumulation: int) -> dict[Feature, float]:
        found = {(name, value): 1.0 for name, value in setting.items() if name != STAGE and value != self.own.get(name)}
        sharding = self._sharding(setting, accumulation) - self._sharding(self.own, accumulation)
        if sharding:
            own, here = (self.roofline(each, micro, accumulation) for each in (self.own, setting))
            found |= dict.fromkeys(sharding, own / here)
        return found

    def _sharding(self, setting: Setting, accumulation: int) -> set[Feature]:
        plan = self.plan(setting)
        every = {(GRADIENTS, plan.reduces_every_micro_batch)} if accumulation > 1 else set()
        return {(PARAMETERS, plan.shards_parameters), (OPTIMIZER, plan.shards_optimizer), *every}

    def _spread_of(self, feature: Feature) -> float:
        """How wrong the roofline may be about a feature, before any launch had it: a standard deviation."""
        if feature[0] in (ACTIVATIONS, CHUNKED_LOSS):
            return LEAST_SPREAD  # they make room, and compute the same
        if feature[0] not in (PARAMETERS, GRADIENTS, OPTIMIZER) or "compute" not in self.survey.split:
            return PRIOR_SPREAD
        others = 1 - float(self.survey.split["compute"])
        return min(PRIOR_SPREAD, max(LEAST_SPREAD, others / 2))  # two of them: all that is no compute

    def _correction(self, setting: Setting, micro: int, accumulation: int) -> tuple[float, float]:
        """Mean and standard deviation of log(measured / roofline)."""
        key = key_of(setting), micro, accumulation
        if key not in self._corrections:
            self._corrections[key] = self._corrected(setting, micro, accumulation)
        return self._corrections[key]

    def _corrected(self, setting: Setting, micro: int, accumulation: int) -> tuple[float, float]:
        features = self.features(setting, micro, accumulation)
        if not features and setting == self.own:
            return 0.0, 0.0
        known = np.array([features.get(name, 0.0) for name in self._names])
        variance = sum((features[new] * self._spread_of(new)) ** 2 for new in features.keys() - set(self._names))
        if not self._names:
            return 0.0, math.sqrt(variance + INTERPLAY**2)
        return float(known @ self._weights), math.sqrt(variance + known @ self._covariance @ known + INTERPLAY**2)


def _ratio(on: bool, own: bool, factor: float) -> float:
    return 1.0 if on == own else factor if on else 1 / factor
