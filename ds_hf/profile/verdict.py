"""What limits a run, in words: each finding with its figures and, where there is one, the change that would help.

What a change would bring is the autotuner's cost model's to say (``autotune.cost``), fed with what this run measured:
its step, its update, the bandwidth that its collectives had. It is a prediction, and is called one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_hf.autotune.cost import HOST_UPDATE, CostModel, Survey
from ds_hf.autotune.options import gib
from ds_hf.autotune.space import CHECKPOINTING, COMPILE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, STAGE, config_of
from ds_hf.config.load import examine
from ds_hf.config.plan import Placement, less_divided, stages_with
from ds_hf.engine.observe.report.spans import NEXT_BATCH
from ds_hf.errors import ConfigError
from ds_hf.profile.analysis import Analysis, Late, Unequal, fullest_expert

__all__ = ["Finding", "Verdict", "changed_file", "judge", "milliseconds"]

LEAST = 0.03  # of a step: what takes less is not told
LEAST_GAIN = 1.03
MOST_LATE = 3  # ranks that are named
_MOST_BRIEF = 3  # findings in the headline
HPZ = "zero_optimization.zero_hpz_partition_size"
CHUNKS = "ds_hf.pipeline.chunks"
WIRE_GRADIENTS = "ds_hf.wire.gradients"
_BLOCK_BITS = 8 + 32 / 256  # a number in 8 bits with its part of a block's scale
_UPDATE_DIVIDED = stages_with(gradients=Placement.PARTIAL, optimizer=Placement.SHARDED)[0]
_ROOM = 0.92  # of the device's memory that may be planned with
_MOVED = ("gather", "reduction", "collective", "update", "offload")  # what placements of states have to do with
NAMES = {
    "gather": "gathers of weights",
    "reduction": "reductions of gradients",
    "tensor": "collectives of tensor parallelism",
    "sequence": "collectives of sequence parallelism",
    "experts": "exchanges of tokens between experts",
    "collective": "other collectives",
    "pipeline": "pipeline bubbles",
    "update": "the update",
    "offload": "waits for offload",
    "loader": "waits for the data loader",
    "script": "the script outside of the engine",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "report": "this report",
    "compute": "forward and backward",
}


@dataclass(frozen=True)
class Finding:
    """One thing that takes time.

    Attributes:
        kind: of ``spans.KINDS``, "late" or "unequal".
        share: of a step. seconds: a step.
        text: what it is. advice: what would help; may be empty.
        changes: dotted keys of the file -> values that do it. option: of the script, as two words.
        gain: how much faster a step would be, predicted; 1 where nothing is predicted.
        rank, place: of one that is late.
    """

    kind: str
    share: float
    seconds: float
    text: str
    advice: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    option: tuple[str, str] | None = None
    gain: float = 1.0
    rank: int | None = None
    place: str = ""

    @property
    def brief(self) -> str:
        """Without figures between brackets, and with what to change and what that brings."""
        words = " and ".join(f"{key} {value}" for key, value in self.changes.items())
        gain = f", {self.gain:.2f} x by prediction" if words and self.gain > 1 else ""
        return self.text.partition(" (")[0] + (f": try {words}{gain}" if words else "")

    def __str__(self) -> str:
        return self.text + (f": {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Verdict:
    """All findings, what takes most first.

    Attributes:
        summary: the run in a line.
        changes: of the findings, those that go together. config: the file with them, where there are any.
    """

    analysis: Analysis
    summary: str
    findings: tuple[Finding, ...]
    config: dict[str, Any] | None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """What limits the run most, by size."""
        if not self.analysis.steps:
            return "no step was recorded by every rank"
        most = "; ".join(finding.brief for finding in self.findings[:_MOST_BRIEF])
        return most or "nothing stands out: the device computes nearly all the time"

    def lines(self) -> list[str]:
        """As a paragraph for the terminal, one sentence a line."""
        return [self.summary, *(f"- {finding}" for finding in self.findings)]


def milliseconds(seconds: float) -> str:
    """ "41 ms", "4.1 ms"."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 9.95 else f"{value:.1f} ms"


def judge(analysis: Analysis) -> Verdict:
    """The findings of an analysis."""
    if not analysis.steps:
        return Verdict(analysis, "no step was recorded by every rank", (), None)
    judge_ = _Judge(analysis)
    found = sorted(judge_.findings(), key=lambda finding: -finding.seconds)
    changes = judge_.together(found)
    config = changed_file(analysis.run.written, judge_.tree, changes) if changes else None
    return Verdict(analysis, _summary(analysis), tuple(found), config, changes)


def changed_file(written: Mapping[str, Any], tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The user's file with changes, all else as it was written.

    Args:
        tree: as ds_hf read it, which is changed where what was written does not go with the changes (a key under an
            older name).
    """
    result = config_of(written, dict(changes))
    if "autotuning" in written:
        result["autotuning"] = written["autotuning"]
    try:
        examine(result, world=None, allow_auto=True)
    except ConfigError:
        return _without_report(config_of(tree, dict(changes)))
    return result


def _without_report(result: dict[str, Any]) -> dict[str, Any]:
    section = result.get("ds_hf")
    if isinstance(section, dict):
        section.pop("report", None)
        section.pop("report_steps", None)
        if not section:
            del result["ds_hf"]
    return result


def _summary(a: Analysis) -> str:
    words = [f"{name(kind)} {share:.0%}" for kind, share in _largest(a)]
    rate = f", {a.tokens_a_second:,.0f} tokens/s" if a.tokens_a_second else f", {a.samples_a_second:,.3g} samples/s"
    mfu = f", {a.mfu:.1%} of the matrix rate" if a.mfu else ""
    return f"a step takes {milliseconds(a.seconds)} ({', '.join(words)}){rate}{mfu}"


def _largest(a: Analysis) -> list[tuple[str, float]]:
    shares = [(kind, a.share(kind)) for kind in a.kinds]
    return [item for item in sorted(shares, key=lambda item: -item[1]) if item[1] >= 0.005][:6]


def name(kind: str) -> str:
    """For people."""
    return NAMES[kind]


class _Judge:
    def __init__(self, analysis: Analysis) -> None:
        self.a = analysis
        header = analysis.run.header
        self.facts, self.tree = header["facts"], header["config"]
        self.rows = {row: Placement(spec["placement"]) for row, spec in header["plan"].items()}
        self.hosts = -(-analysis.run.world_size // max(int(header["hosts_of"]), 1))
        self.model, self.own = self._model()

    # -- the cost model -------------------------------------------------------------------------------------------

    def _model(self) -> tuple[CostModel | None, dict[str, Any]]:
        a, batch = self.a, self.a.run.header["batch"]
        own: dict[str, Any] = {
            STAGE: _get(self.tree, STAGE) or 0,
            CHECKPOINTING: bool(self.facts.get("checkpointing")),
            COMPILE: _get(self.tree, COMPILE) or False,
            OFFLOAD_OPTIMIZER: _get(self.tree, OFFLOAD_OPTIMIZER) or "none",
            OFFLOAD_PARAM: _get(self.tree, OFFLOAD_PARAM) or "none",
        }
        engine = a.seconds - sum(a.kinds.get(kind, 0.0) for kind in ("loader", "script", "checkpoint", "evaluation"))
        update = a.kinds.get("update", 0.0) + a.kinds.get("offload", 0.0)
        points = {int(batch["micro"]): (max(engine, 1e-6), int(batch["accumulation"]), update, 0)}
        split = {"compute": a.share("compute")}
        try:
            survey = Survey(self.facts, {"bandwidth": None}, points, split)
            bytes_of = CostModel(self.tree, own, survey, None)
            each, last, after = bytes_of._communication(own)
            nbytes = each * int(batch["accumulation"]) + last + after
            moving = sum(a.traffic[kind].moving for kind in ("gather", "reduction") if kind in a.traffic)
            bandwidth = nbytes / moving if moving > 0 and nbytes > 0 else None
            model = CostModel(self.tree, own, Survey(self.facts, {"bandwidth": bandwidth}, points, split), None)
        except (ConfigError, KeyError, TypeError, ValueError):
            return None, own
        return model, own

    def gain(self, changes: Mapping[str, Any]) -> float:
        """How much faster a step would be with ``changes``; 0 where they are not legal or do not fit."""
        if self.model is None:
            return 0.0
        setting = {**self.own, **changes}
        try:
            examine(config_of(self.tree, setting), world=None, allow_auto=True)
            size = next(iter(self.model.survey.points))
            steps = self.model.survey.points[size][1]
            saved = self.model.roofline(self.own, size, steps) - self.model.roofline(setting, size, steps)
            if not self._fits(setting, steps):
                return 0.0
        except (ConfigError, ValueError, ArithmeticError):
            return 0.0
        concerned = (*_MOVED, "compute") if COMPILE in changes else _MOVED
        saved = min(saved, sum(self.a.kinds.get(kind, 0.0) for kind in concerned))  # what else there is stays
        return self.a.seconds / max(self.a.seconds - saved, 0.05 * self.a.seconds)

    def _fits(self, setting: Mapping[str, Any], steps: int) -> bool:
        memory, peak = self.facts.get("memory"), self._peak()
        if not memory or self.model is None:
            return True
        more = self.model.states(dict(setting), steps).device - self.model.states(self.own, steps).device
        return more <= 0 or (peak is not None and peak + more <= _ROOM * memory)

    def _peak(self) -> int | None:
        found = [rank.memory["peak"] for rank in self.a.run.ranks if rank.memory]
        return max(found) if found else None

    def best(self, candidates: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
        """The one that brings most, and how much."""
        gains = [(self.gain(each), index) for index, each in enumerate(candidates)]
        gain, index = max(gains, default=(0.0, 0))
        return (candidates[index], gain) if gain >= LEAST_GAIN else ({}, 1.0)

    # -- findings -------------------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Each that takes a share of a step that is worth telling."""
        for late in self.a.late[:MOST_LATE]:
            if late.share >= LEAST:
                yield self._late(late)
        if self.a.unequal is not None and self.a.unequal.share >= LEAST:
            yield self._unequal(self.a.unequal)
        told = {
            "gather": self._gather,
            "reduction": self._reduction,
            "loader": self._loader,
            "offload": self._offload,
            "pipeline": self._pipeline,
            "update": self._update,
            "script": self._script,
            "compute": self._compute,
            "tensor": self._other,
            "sequence": self._other,
            "experts": self._other,
            "collective": self._other,
        }
        for kind, tell in told.items():
            if self.a.share(kind) >= LEAST and (finding := tell(kind)) is not None:
                yield finding

    def _late(self, late: Late) -> Finding:
        where = f"at {late.place}" if late.kind in ("compute", "offload") else f"in {name(late.kind)}"
        text = (
            f"rank {late.rank} takes {milliseconds(late.seconds)} longer than the others {where}, and they wait for "
            f"it: {late.share:.0%} of every step"
        )
        host = next(r.header["host"] for r in self.a.run.ranks if r.number == late.rank)
        advice = {
            "compute": f"look at what else runs on {host}, at its clocks, and whether its inputs are longer",
            "loader": "give every rank a loader of the same speed, or more workers",
            "offload": f"look at the disk of {host}",
        }.get(late.kind, "find out what only this rank does")
        return Finding("late", late.share, late.seconds, text, advice, rank=late.rank, place=late.place)

    def _unequal(self, unequal: Unequal) -> Finding:
        text = (
            f"ranks are given unequal numbers of tokens (the one with most {unequal.ratio:.2f} times the mean) and "
            f"wait for it for {milliseconds(unequal.seconds)}, {unequal.share:.0%} of a step"
        )
        advice = (
            'batches of equal cost mend that: train_sampling_strategy="batch_rebalance" of the Trainer, or '
            "data_efficiency.data_sampling.dynamic_batching, or packing (docs/data.md)"
        )
        return Finding("unequal", unequal.share, unequal.seconds, text, advice)

    def _exposed(self, kind: str) -> tuple[str, float]:
        """What a kind of collectives takes, and without waits for late ranks."""
        a, seconds = self.a, self.a.kinds[kind]
        traffic = a.traffic.get(kind)
        text = f"{name(kind)} are exposed for {milliseconds(seconds)}, {a.share(kind):.0%} of a step"
        if traffic is None or not traffic.calls:
            return text, seconds
        late = min(traffic.late, seconds)
        text += f" ({traffic.calls:,.0f} of them"
        if kind != "experts":  # whose sizes differ from rank to rank, and are not noted
            text += f", {traffic.nbytes / 2**20:,.1f} MiB a rank"
            text += f" at {traffic.rate / 1e9:.2g} GB/s" if traffic.rate else ""
        text += f"; {milliseconds(late)} of it until the last rank comes)" if late > 0.2 * seconds else ")"
        return text, seconds - late

    def _gather(self, kind: str) -> Finding | None:
        text, moving = self._exposed(kind)
        candidates = [{STAGE: lower} for lower in less_divided(self.rows.values())]
        if self._divides("parameters") and self.hosts > 1:
            candidates.append({HPZ: int(self.a.run.header["hosts_of"])})
        changes, gain = self.best(candidates) if moving > LEAST * self.a.seconds else ({}, 1.0)
        return self._finding(kind, text, changes, gain, "the weights then stay whole on each rank")

    def _reduction(self, kind: str) -> Finding | None:
        text, moving = self._exposed(kind)
        steps = int(self.a.run.header["batch"]["accumulation"])
        once_would_do = steps > 1 and self._divides("gradients")
        candidates: list[dict[str, Any]] = []
        if once_would_do or self._divides_nothing_yet():
            candidates.append({STAGE: _UPDATE_DIVIDED})
        if self._divides("parameters") and self.hosts > 1:
            candidates.append({HPZ: int(self.a.run.header["hosts_of"])})
        changes, gain = self.best(candidates) if moving > LEAST * self.a.seconds else ({}, 1.0)
        packed = self._packed_gain(moving)
        if packed > gain:
            why = "docs/communication.md says what that does to a loss"
            return self._finding(kind, text, {WIRE_GRADIENTS: 8}, packed, why)
        why = "gradients then travel once a step and not with every micro-batch" if once_would_do else ""
        advice = ""
        if not changes and steps == 1 and moving > LEAST * self.a.seconds:
            advice = (
                f"more samples in a micro-batch, or gradient_accumulation_steps at stage {_UPDATE_DIVIDED}, share them"
            )
        return self._finding(kind, text, changes, gain, why, advice)

    def _packed_gain(self, moving: float) -> float:
        """How much faster a step would be with gradients in 8 bits, for which links between hosts are slow enough."""
        few = self.hosts < 2 or moving <= LEAST * self.a.seconds
        if few or not self._divides("optimizer") or _get(self.tree, WIRE_GRADIENTS):
            return 0.0
        bits = {"bfloat16": 16, "float16": 16}.get(str(self.facts.get("module_dtype")), 32)
        saved = moving * (1 - _BLOCK_BITS / bits)
        gain = self.a.seconds / (self.a.seconds - saved)
        return gain if gain >= LEAST_GAIN and self._is_legal({WIRE_GRADIENTS: 8}) else 0.0

    def _divides(self, row: str) -> bool:
        """Whether a row of the state plan is divided over the ranks."""
        return self.rows[row] is Placement.SHARDED

    def _divides_nothing_yet(self) -> bool:
        return self.a.run.world_size > 1 and Placement.SHARDED not in self.rows.values()

    def _is_legal(self, changes: Mapping[str, Any]) -> bool:
        try:
            examine(config_of(self.tree, dict(changes)), world=None, allow_auto=True)
        except ConfigError:
            return False
        return True

    def _loader(self, kind: str) -> Finding:
        a, seconds = self.a, self.a.kinds[kind]
        cores = int(self.facts.get("cores") or 1)
        rest = max(a.seconds - seconds, 0.05 * a.seconds)
        places = [place for place in a.places if place.startswith(NEXT_BATCH)]
        before = max((int(place.rpartition(" ")[2]) for place in places), default=0)
        count = 2 * before if before else max(1, min(math.ceil(seconds / rest), cores))
        text = f"the loader is waited for {milliseconds(seconds)}, {a.share(kind):.0%} of a step"
        workers = f"{count} worker{'s' if count > 1 else ''}"
        if before:
            text += f", with {before} worker{'s' if before > 1 else ''}"
            advice = f"{workers}, if there are cores for them ({cores} a process here), or less work for each sample"
            option = ("--dataloader_num_workers", str(count))
            return Finding(kind, a.share(kind), seconds, text, advice, option=option)
        hidden = min(seconds, count * rest)
        return Finding(
            kind,
            a.share(kind),
            seconds,
            text,
            f"{workers} (dataloader_num_workers, or num_workers of the DataLoader) load{'s' if count == 1 else ''} "
            "beside the computation, "
            f"{a.seconds / (a.seconds - hidden):.2f} x by prediction",
            option=("--dataloader_num_workers", str(count)),
            gain=a.seconds / (a.seconds - hidden),
        )

    def _offload(self, kind: str) -> Finding:
        a, seconds = self.a, self.a.kinds[kind]
        text = f"offload is waited for {milliseconds(seconds)}, {a.share(kind):.0%} of a step"
        disk = [
            f"{operation}s {nbytes / 2**20:,.1f} MiB in {milliseconds(took)}"
            for operation, (took, nbytes) in a.files.items()
            if nbytes
        ]
        changes: dict[str, Any] = {}
        if disk:
            text += f", by the disk ({', '.join(disk)})"
            for key in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM):
                if self.own[key] == "nvme":
                    changes[key] = "cpu"
            free = self.facts.get("host_memory") or 0
            advice = f"host memory ({gib(free)} a process here) instead of files, if the states fit there"
        else:
            advice = "ds_hf.offload.ratio leaves a share of the states on the device, as far as memory allows"
        gain = a.seconds / max(a.seconds - 0.9 * seconds, 0.05 * a.seconds)
        return Finding(kind, a.share(kind), seconds, text, advice, changes, gain=gain)

    def _pipeline(self, kind: str) -> Finding:
        a, mesh = self.a, self.a.run.header["mesh"]
        stages, micros = int(mesh["pipe"]), a.micro_steps
        chunks = int(_get(self.tree, CHUNKS) or 1)
        text = (
            f"pipeline bubbles take {milliseconds(a.kinds[kind])}, {a.share(kind):.0%} of a step; {stages} stages and "
            f"{micros} micro-batches leave {(stages - 1) / (micros * chunks + stages - 1):.0%} idle at best"
        )
        can = micros % stages == 0 and chunks == 1
        changes = {CHUNKS: 2} if can else {}
        saved = a.kinds[kind] / 2 if can else 0.0
        advice = "two chunks a stage halve them" if can else "more micro-batches a step (gradient_accumulation_steps)"
        return Finding(kind, a.share(kind), a.kinds[kind], text, advice, changes, gain=a.seconds / (a.seconds - saved))

    def _update(self, kind: str) -> Finding | None:
        a = self.a
        text = f"the update takes {milliseconds(a.kinds[kind])}, {a.share(kind):.0%} of a step"
        steps = int(a.run.header["batch"]["accumulation"])
        candidates: list[dict[str, Any]] = []
        if self.own[OFFLOAD_OPTIMIZER] == "nvme":
            return self._from_files(text)
        if self.own[OFFLOAD_OPTIMIZER] == "cpu":
            candidates.append({OFFLOAD_OPTIMIZER: "none"})
        if self._divides_nothing_yet():
            candidates.append({STAGE: _UPDATE_DIVIDED})
        changes, gain = self.best(candidates)
        advice = "" if changes else f"more micro-batches a step than {steps} share one update"
        why = "each rank then updates its own part only" if STAGE in changes else ""
        return self._finding(kind, text, changes, gain, why, advice)

    def _from_files(self, text: str) -> Finding:
        """An update that reads and writes its states: what is left of it in host memory is the CPU's part."""
        a, seconds = self.a, self.a.kinds["update"]
        owned = float(self.facts["trainable"]) / max(a.run.world_size, 1)
        saved = max(0.0, seconds - owned / HOST_UPDATE)
        free = self.facts.get("host_memory") or 0
        gain = a.seconds / max(a.seconds - saved, 0.05 * a.seconds)
        advice = f"try {OFFLOAD_OPTIMIZER} cpu, if the states fit into host memory ({gib(free)} a process here), "
        advice += f"{gain:.2f} x by prediction"
        text += ", with states that are read from files and written back"
        return Finding("update", a.share("update"), seconds, text, advice, {OFFLOAD_OPTIMIZER: "cpu"}, gain=gain)

    def _script(self, kind: str) -> Finding:
        a = self.a
        text = f"{milliseconds(a.kinds[kind])} of a step, {a.share(kind):.0%}, are outside of the engine"
        advice = (
            "look for .item(), logging, metrics or data preparation between steps (a torch DataLoader is told apart)"
        )
        return Finding(kind, a.share(kind), a.kinds[kind], text, advice)

    def _compute(self, kind: str) -> Finding | None:
        a = self.a
        if a.share(kind) < 0.5:
            return None
        mfu = f": {a.mfu:.1%} of the device's matrix rate" if a.mfu else ""
        text = f"forward and backward compute for {milliseconds(a.kinds[kind])}, {a.share(kind):.0%} of a step{mfu}"
        if a.starved > 0.5:
            text += f"; the GPU keeps up with the host at {a.starved:.0%} of the places looked at: launches limit it"
        candidates = [] if self.own[COMPILE] or not self.facts.get("cuda") else [{COMPILE: "blocks"}]
        changes, gain = self.best(candidates)
        if self.own[CHECKPOINTING] and not changes:
            cheaper = 1 / (1 - a.share(kind) * 0.25)
            advice = f"without gradient checkpointing, if memory allows, {cheaper:.2f} x by prediction"
            return Finding(kind, a.share(kind), a.kinds[kind], text, advice)
        return self._finding(kind, text, changes, gain, "blocks are compiled", "" if changes else self._faster())

    def _faster(self) -> str:
        """What shortens computing where the cost model proposes nothing."""
        batch, bits = self.a.run.header["batch"], ("bf16.enabled", "fp16.enabled", "torch_autocast.enabled")
        ways = ["more samples in a micro-batch, if memory allows"]
        if int(batch["accumulation"]) > 1:
            alike = "memory allows and the loss is a mean over samples"  # docs/autotuning.md
            ways = [f"a larger micro-batch instead of {batch['accumulation']} a step, if {alike}"]
        if not any(_get(self.tree, name) is True for name in bits):
            ways.append("bf16 in the place of fp32")
        if not self.own[COMPILE]:
            ways.append(f"{COMPILE} blocks, if the model's blocks compile")
        ways.append("an attention kernel (attn_implementation sdpa or flash_attention_2)")
        return f"what may still help: {'; '.join(ways)}"

    def _other(self, kind: str) -> Finding:
        text, _ = self._exposed(kind)
        advice = {
            "tensor": "tensor parallelism inside a host, over as few processes as memory allows",
            "sequence": "sequence parallelism inside a host, over as few processes as memory allows",
            "experts": "a smaller expert_parallel.autoep_size, where memory allows it; where the others wait for the "
            "process with the fullest experts, a router that is balanced",
        }.get(kind, "")
        if kind == "experts" and (fullest := fullest_expert(self.a.run)):
            text += f"; {fullest}"
        return Finding(kind, self.a.share(kind), self.a.kinds[kind], text, advice)

    def _finding(
        self, kind: str, text: str, changes: Mapping[str, Any], gain: float, why: str = "", advice: str = ""
    ) -> Finding:
        if changes:
            words = ", ".join(f"{key} {value}" for key, value in changes.items())
            because = f"; {why}" if why else ""
            takes_more = any(key.startswith("zero_optimization.") for key in changes) and not self.facts.get("memory")
            room = ", if memory allows" if takes_more else ""
            advice = f"try {words}{room}, {gain:.2f} x by prediction{because}"
        return Finding(kind, self.a.share(kind), self.a.kinds[kind], text, advice, changes, gain=gain)

    def together(self, findings: list[Finding]) -> dict[str, Any]:
        """The changes of all findings that ds_hf takes together; the best come first."""
        chosen: dict[str, Any] = {}
        for finding in sorted(findings, key=lambda finding: -finding.gain):
            if finding.changes and not set(finding.changes) & set(chosen):
                both = {**chosen, **finding.changes}
                try:
                    examine(config_of(self.tree, both), world=None, allow_auto=True)
                except ConfigError:
                    continue
                chosen = both
        return chosen


def _get(tree: Mapping[str, Any], name: str) -> Any:
    found: Any = tree
    for key in name.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found
