"""A world with known answers in place of launches: times and memory by formula, so that the optimum is known.

``World.run`` has the signature of ``run_launch``: it reads the configuration that the search wrote, and answers with
the events that an engine would have written. Nothing is measured, so every figure is the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.autotune.trial import Launch, Outcome

MIB = 2**20
GLOBAL_MICRO, GLOBAL_STEPS, WORLD = 2, 16, 4
NUMEL = 40_000_000


@dataclass
class World:
    """A model of 40 M fp32 parameters on four devices.

    Attributes:
        memory: bytes of a device. launched: settings in the order of their launches. points: how many were measured.
        fail: stage -> kind of an outcome that takes the place of measuring.
    """

    memory: int = 2**40
    launched: list[dict[str, Any]] = field(default_factory=list)
    points: int = 0
    fail: dict[int, str] = field(default_factory=dict)
    before: Callable[[int], None] = lambda number: None
    resizable: bool = True

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        """Of one step. The roofline of ``cost`` does not know the factors 0.9 and 1.25, nor the dent at stage 2."""
        compute = (0.004 + 0.010 * micro**0.92) * (1.25 if checkpointing else 1) * (0.9 if compiled else 1)
        gradients = 0.020 * (1.2 if stage == 2 else 1)
        each = {0: 0.0, 1: 0.0, 2: gradients, 3: gradients + 0.045}[stage]
        once = {0: 2 * gradients, 1: 2 * gradients, 2: 0.02, 3: 0.0}[stage]
        return steps * (compute + each) + once + {0: 0.02}.get(stage, 0.005)

    def nbytes(self, stage: int, checkpointing: bool, micro: int) -> int:
        """Peak of one device."""
        share = {0: 16, 1: 8 + 8 / WORLD, 2: 4 + 12 / WORLD, 3: 16 / WORLD + 1}[stage]
        return int(NUMEL * share + (12 if checkpointing else 60) * MIB * micro + 30 * MIB)

    def run(self, launch: Launch, watch: Any) -> Outcome:
        """One launch."""
        self.before(len(self.launched))
        tree = json.loads((Path(launch.request.events).parent / "ds_config.json").read_text())
        stage = tree.get("zero_optimization", {}).get("stage", 0)
        request = launch.request
        words = list(launch.words)
        checkpointing = bool(request.gradient_checkpointing) or "True" in words
        compiled = bool(tree.get("ds_hf", {}).get("compile"))
        self.launched.append({"stage": stage, "checkpointing": checkpointing, "compiled": compiled})
        outcome = Outcome("ok", seconds=10.0)
        events: list[dict[str, Any]] = [self.facts()]
        if stage in self.fail and not request.own_axis:
            return Outcome(self.fail[stage], f"made to {self.fail[stage]}", seconds=10.0)
        if request.survey and self.resizable:
            events.append(self.survey(stage))
        sizes = request.points
        if request.own_axis:
            share = GLOBAL_MICRO * GLOBAL_STEPS
            sizes = tuple((m, share // m) for m in (2, 4, 8, 16, 32, 1))
        if not self.resizable:
            events.append({"event": "note", "text": "no loss", "resizable": False})
            sizes = ()
        events += [self.point(stage, checkpointing, compiled, *size) for size in sizes]
        if request.natural_steps:
            given = [tree.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
            micro, steps = (GLOBAL_MICRO, GLOBAL_STEPS) if "auto" in given else given
            seconds = self.seconds(stage, checkpointing, compiled, micro, steps) + 0.01
            if self.nbytes(stage, checkpointing, micro) > self.memory:
                return Outcome("oom", "out of memory", seconds=10.0, events={"facts": self.facts()})
            events += [
                {"event": "step", "kind": "natural", "seconds": seconds, "micro": micro, "accumulation": steps}
            ] * 6
        for event in events:
            outcome.take(event)
            if watch is not None and watch(event):
                outcome.kind = "pruned"
                break
        if not outcome.points and not outcome.natural:
            outcome.kind, outcome.reason = "oom", "out of memory"
        return outcome

    def point(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> dict[str, Any]:
        peak = self.nbytes(stage, checkpointing, micro)
        base = {"event": "point", "micro": micro, "accumulation": steps, "peak": peak}
        if peak > self.memory:
            return {**base, "outcome": "oom", "reason": "out of memory"}
        self.points += 1
        seconds = self.seconds(stage, checkpointing, compiled, micro, steps)
        return {**base, "outcome": "ok", "seconds": seconds, "low": seconds * 0.995, "high": seconds * 1.005,
                "optimizer_seconds": {0: 0.02}.get(stage, 0.005), "steps": 12}  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return {"event": "facts", "total": NUMEL, "trainable": NUMEL, "largest_unit": NUMEL // 10, "units": 12,
                "module_dtype": "float32", "world_size": WORLD, "micro": GLOBAL_MICRO, "accumulation": GLOBAL_STEPS,
                "train_batch": GLOBAL_MICRO * GLOBAL_STEPS * WORLD, "optimizer": "FusedAdam", "device": "made up",
                "cuda": True, "memory": self.memory, "can_checkpoint": True, "checkpointing": False,
                "torch": "2"}  # fmt: skip

    def survey(self, stage: int) -> dict[str, Any]:
        def peaks(on: bool) -> dict[str, int]:
            found = {str(n): self.nbytes(stage, on, n) for n in (1, 3)}
            return {n: nbytes for n, nbytes in found.items() if nbytes <= self.memory}

        return {"event": "survey", "flops": 10**9, "bandwidth": 1.5 * NUMEL * 4 / 0.04, "sample_numel": 128,
                "plain": peaks(False), "checkpointed": peaks(True)}  # fmt: skip

    def grid(self) -> dict[tuple[int, bool, bool, int], float]:
        """Samples a second of every setting and micro-batch that fits: exhaustive search."""
        share = GLOBAL_MICRO * GLOBAL_STEPS
        return {
            (stage, on, compiled, micro): share * WORLD / self.seconds(stage, on, compiled, micro, share // micro)
            for stage in range(4)
            for on in (False, True)
            for compiled in (False, True)
            for micro in (1, 2, 4, 8, 16, 32)
            if self.nbytes(stage, on, micro) <= self.memory
        }
