"""A world with known answers in place of launches: times and memory by formula, so that the optimum is known.

``World.run`` is called as a ``Runner``: it reads the configuration that the search wrote, and answers with
the events that an engine would have written. Nothing is measured, so every figure is the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.autotune.trial import Launch, LaunchOutcome

MIB = 2**20
GLOBAL_MICRO, GLOBAL_STEPS, WORLD = 2, 16, 4
NUMEL = 40_000_000


@dataclass
class World:
    """A model of 40 M fp32 parameters on four devices.

    Attributes:
        memory: bytes of a device. launched: settings in the order of their launches; again: of those that confirm.
        starts: of processes. points: how many were measured.
        spent: seconds of all launches.
        fail: stage -> kind of an outcome that takes the place of measuring.
        stays: processes wait for further settings.
        numel, dtype: of the parameters. processes, micro, steps: of the user's command.
    """

    memory: int = 2**40
    numel: int = NUMEL
    dtype: str = "float32"
    processes: int = WORLD
    micro: int = GLOBAL_MICRO
    steps: int = GLOBAL_STEPS
    spent: float = 0.0
    launched: list[dict[str, Any]] = field(default_factory=list)
    again: list[dict[str, Any]] = field(default_factory=list)
    starts: int = 0
    points: int = 0
    fail: dict[int, str] = field(default_factory=dict)
    before: Callable[[int], None] = lambda number: None
    resizable: bool = True
    stays: bool = True

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        """Of one step. The roofline of ``cost`` does not know the factors 0.9 and 1.25, nor the dent at stage 2."""
        compute = (0.004 + 0.010 * micro**0.92) * (1.25 if checkpointing else 1) * (0.9 if compiled else 1)
        gradients = 0.020 * (1.2 if stage == 2 else 1)
        each = {0: 0.0, 1: 0.0, 2: gradients, 3: gradients + 0.045}[stage]
        once = {0: 2 * gradients, 1: 2 * gradients, 2: 0.02, 3: 0.0}[stage]
        return steps * (compute + each) + once + {0: 0.02}.get(stage, 0.005)

    def compute_share(self, stage: int, micro: int, steps: int) -> float | None:
        """Of the user's step, as a profile would show it; ``None``: there was none."""
        return None

    start_seconds: float = 6.0
    surveyed: dict[str, Any] = field(default_factory=dict)  # by the survey beside the rest
    together: str = ""  # why samples do not count by themselves

    def launch_seconds(self, compiled: bool, points: int) -> float:
        """Of a launch, whose processes take ``start_seconds`` of it to start."""
        return 10.0

    def nbytes(self, stage: int, checkpointing: bool, micro: int, compiled: bool = False) -> int:
        """Peak of one device."""
        share = {0: 16, 1: 8 + 8 / WORLD, 2: 4 + 12 / WORLD, 3: 16 / WORLD + 1}[stage]
        return int(NUMEL * share + (12 if checkpointing else 60) * MIB * micro + 30 * MIB)

    def run(self, launch: Launch, watch: Any) -> LaunchOutcome:
        """One launch."""
        self.before(len(self.launched))
        tree = json.loads((Path(launch.request.events).parent / "ds_config.json").read_text())
        stage = tree.get("zero_optimization", {}).get("stage", 0)
        request = launch.request
        words = list(launch.words)
        checkpointing = bool(request.gradient_checkpointing) or "True" in words
        compiled = bool(tree.get("ds_hf", {}).get("compile"))
        kind = self.again if Path(request.events).parent.name.startswith("again") else self.launched
        kind.append({"stage": stage, "checkpointing": checkpointing, "compiled": compiled})
        outcome = LaunchOutcome("ok", seconds=self.launch_seconds(compiled, len(request.points) or 1))
        if launch.goes_on:
            outcome.seconds -= self.start_seconds
        else:
            self.starts += 1
        self.spent += outcome.seconds
        events: list[dict[str, Any]] = [self.facts()]
        if stage in self.fail and not request.own_axis:
            return LaunchOutcome(self.fail[stage], f"made to {self.fail[stage]}", seconds=10.0)
        if request.survey and self.together:
            events.append({"event": "together", "why": self.together})
        if request.survey and self.resizable:
            events.append(self.survey(stage))
        sizes = request.points
        if request.own_axis:
            sizes = tuple(
                each for each in self.sizes().items() if each[0] in (self.micro, *range(request.high_micro + 1))
            )
            if request.largest:
                share = self.micro * self.steps
                sizes += tuple((2**power, 1) for power in range(request.high_micro.bit_length()) if 2**power > share)
        if not self.resizable:
            events.append({"event": "note", "text": "no loss", "resizable": False})
            sizes = ()
        events += [self.point(stage, checkpointing, compiled, *size) for size in sizes]
        share = self.compute_share(stage, self.micro, self.steps)
        if share is not None and request.own_axis:
            events.append({"event": "split", "compute": share, "communication": 0.8 * (1 - share),
                           "idle": 0.2 * (1 - share)})  # fmt: skip
        if request.natural_steps:
            given = [tree.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
            micro, steps = (self.micro, self.steps) if "auto" in given else given
            seconds = self.seconds(stage, checkpointing, compiled, micro, steps) + 0.01
            if self.nbytes(stage, checkpointing, micro, compiled) > self.memory:
                return LaunchOutcome("oom", "out of memory", seconds=10.0, events={"facts": self.facts()})
            events += [
                {"event": "step", "kind": "natural", "seconds": seconds, "micro": micro, "accumulation": steps}
            ] * 6
        events.append({"event": "done", "stays": bool(request.further) and self.resizable and self.stays})
        for event in events:
            outcome.take(event)
            if watch is not None:
                watch(event)
        if not outcome.points and not outcome.natural:
            outcome.kind, outcome.reason = "oom", "out of memory"
        return outcome

    def point(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> dict[str, Any]:
        peak = self.nbytes(stage, checkpointing, micro, compiled)
        base = {"event": "point", "micro": micro, "accumulation": steps, "peak": peak}
        if peak > self.memory:
            return {**base, "outcome": "oom", "reason": "out of memory"}
        self.points += 1
        seconds = self.seconds(stage, checkpointing, compiled, micro, steps)
        return {**base, "outcome": "ok", "seconds": seconds, "low": seconds * 0.995, "high": seconds * 1.005,
                "optimizer_seconds": self.update_seconds(stage), "steps": 12}  # fmt: skip

    def update_seconds(self, stage: int) -> float:
        """Of the optimizer."""
        return {0: 0.02}.get(stage, 0.005)

    def sizes(self) -> dict[int, int]:
        """Every division of the global batch: micro-batch -> steps, the user's first."""
        share = self.micro * self.steps
        others = [m for m in (*range(self.micro + 1, share + 1), *range(self.micro)[::-1]) if m and share % m == 0]
        return {m: share // m for m in (self.micro, *others)}

    def facts(self) -> dict[str, Any]:
        return {"event": "facts", "total": self.numel, "trainable": self.numel, "largest_unit": self.numel // 10,
                "units": 12, "module_dtype": self.dtype, "world_size": self.processes, "micro": self.micro,
                "accumulation": self.steps, "train_batch": self.micro * self.steps * self.processes,
                "optimizer": "FusedAdam", "device": "made up", "cuda": True, "memory": self.memory,
                "can_checkpoint": True, "checkpointing": False, "torch": "2"}  # fmt: skip

    def survey(self, stage: int) -> dict[str, Any]:
        def peaks(on: bool) -> dict[str, int]:
            found = {str(n): self.nbytes(stage, on, n) for n in (1, 3)}
            return {n: nbytes for n, nbytes in found.items() if nbytes <= self.memory}

        return {"event": "survey", "flops": 10**9, "shapes": {"input_ids": [self.micro, 128]},
                "bandwidth": self.bandwidth(), "sample_numel": 128,
                "plain": peaks(False), "checkpointed": peaks(True), **self.surveyed}  # fmt: skip

    def bandwidth(self) -> float:
        """Bytes a second of the collectives."""
        return 1.5 * NUMEL * 4 / 0.04

    def grid(self) -> dict[tuple[int, bool, bool, int], float]:
        """Samples a second of every setting and micro-batch that fits: exhaustive search."""
        share = self.micro * self.steps
        return {
            (stage, on, compiled, micro): share * self.processes / self.seconds(stage, on, compiled, micro, steps)
            for stage in range(4)
            for on in (False, True)
            for compiled in (False, True)
            for micro, steps in self.sizes().items()
            if self.nbytes(stage, on, micro, compiled) <= self.memory
        }


@dataclass
class TwoH200(World):
    """A Llama of 1.36 B parameters on two H200, 4 x 2048 tokens each, bf16; milliseconds as measured there.

    The defaults are what ``benchmarks/training.py`` found (docs/measurements.md); others are drawn around them.

    Attributes:
        eager, compiled: forward and backward of a micro-batch of 4. again: of that with checkpointing.
        other: everything else of a step, by stage. each: more of it for another micro-batch.
        update: the optimizer's part of ``other``. norms: the part of other kernels, which a profile counts as compute:
            what is left at stage 3 without the 2.6 ms of collectives that a profile showed, half of it taken as idle.
    """

    memory: int = 140 * 2**30
    numel: int = 1_364_297_728
    dtype: str = "bfloat16"
    processes: int = 2
    micro: int = 4
    steps: int = 1
    eager: float = 180.0
    compiled: float = 122.0
    again: float = 1.3
    other: tuple[float, ...] = (25.0, 19.0, 18.0, 20.0)
    each: tuple[float, ...] = (0.0, 0.0, 4.0, 8.0)
    update: float = 4.9
    norms: float = 6.2
    start_seconds: float = 20.0

    def compute(self, checkpointing: bool, compiled: bool, micro: int) -> float:
        whole = self.compiled if compiled else self.eager
        return whole * (micro / 4) ** 0.97 * (self.again if checkpointing else 1)

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        work = steps * self.compute(checkpointing, compiled, micro)
        return (work + self.other[stage] + (steps - 1) * self.each[stage]) / 1e3

    def compute_share(self, stage: int, micro: int, steps: int) -> float | None:
        work = steps * self.compute(False, False, micro) + self.update + self.norms
        return min(1.0, work / 1e3 / self.seconds(stage, False, False, micro, steps))

    def nbytes(self, stage: int, checkpointing: bool, micro: int, compiled: bool = False) -> int:
        share = {0: 16, 1: 10, 2: 9, 3: 8}[stage]
        return int(self.numel * share + (0.8 if checkpointing else 3 if compiled else 4.4) * micro * 2**30)

    def bandwidth(self) -> float:
        return 2.5e11

    def update_seconds(self, stage: int) -> float:
        return self.update * (1 if stage else 2) / 1e3

    def launch_seconds(self, compiled: bool, points: int) -> float:
        """Start of Python, the model, NCCL; then compiling and some steps for each size."""
        return 22.0 + points * (17.0 if compiled else 4.0)


@dataclass
class ExpertsOnTwoH200(World):
    """Five layers of Qwen3-30B-A3B on two H200, 2 x 4096 tokens each, bf16; milliseconds of a step as measured there.

    Attributes:
        steps_ms: (processes that divide experts, 0 for transformers' own way; compiled) -> by stage.
        experts: of the setting that is measured. compiled_for: values of it for which there is compiled code.
    """

    memory: int = 140 * 2**30
    numel: int = 3_737_935_104
    dtype: str = "bfloat16"
    processes: int = 2
    micro: int = 2
    steps: int = 1
    start_seconds: float = 20.0
    steps_ms: dict[tuple[int, bool], tuple[float, ...]] = field(
        default_factory=lambda: {
            (0, False): (149.4, 129.5, 127.2, 159.4), (0, True): (124.6, 106.1, 105.9, 121.6),
            (1, False): (144.3, 122.8, 125.9, 149.3), (1, True): (124.5, 106.0, 108.6, 123.4),
            (2, False): (138.5, 136.9, 138.8, 142.4), (2, True): (124.0, 118.3, 124.9, 118.4),
        }
    )  # fmt: skip
    experts: int = 0
    compiled_for: set[int] = field(default_factory=set)

    def run(self, launch: Launch, watch: Any) -> LaunchOutcome:
        tree = json.loads((Path(launch.request.events).parent / "ds_config.json").read_text())
        section = tree.get("expert_parallel") or {}
        self.experts = section.get("autoep_size", 1) if section.get("enabled") else 0
        return super().run(launch, watch)

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        return self.steps_ms[self.experts, compiled][stage] / 1e3

    def compute_share(self, stage: int, micro: int, steps: int) -> float | None:
        return 0.79

    def update_seconds(self, stage: int) -> float:
        return 0.0145 if stage else 0.029

    def bandwidth(self) -> float:
        return 1.43e11

    def nbytes(self, stage: int, checkpointing: bool, micro: int, compiled: bool = False) -> int:
        return (71 if stage == 0 else 50) * 2**30

    def facts(self) -> dict[str, Any]:
        """Without what limits memory, of which the model would be traced."""
        config = {"num_hidden_layers": 5, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
                  "head_dim": 128, "vocab_size": 151936, "intermediate_size": 6144, "moe_intermediate_size": 768,
                  "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 4096}  # fmt: skip
        model = {"class": "Qwen3MoeForCausalLM", "config": config, "attention": "sdpa"}
        return {**super().facts(), "memory": None, "processes": 2, "on_host": 2, "data": 2, "model": model}

    def launch_seconds(self, compiled: bool, points: int) -> float:
        if self.again:
            return 37.0
        if len(self.launched) == 1:
            return 42.0
        new = compiled and self.experts not in self.compiled_for
        self.compiled_for |= {self.experts} if compiled else set()
        return self.start_seconds + (22.0 if new else 7.0)
