"""A recorded step as a few figures: for monitors (``Train/Step/exposed_gather_ms``, ...) and for the Trainer's logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_hf.engine.observe.report.recorder import RecordedStep
from ds_hf.engine.observe.report.spans import Key, self_times

__all__ = ["NAMES", "figures_of", "mean_of"]

NAMES = {
    "compute": "compute_ms",
    "gather": "exposed_gather_ms",
    "reduction": "exposed_reduction_ms",
    "tensor": "tensor_parallel_ms",
    "sequence": "sequence_parallel_ms",
    "experts": "expert_parallel_ms",
    "pipeline": "pipeline_bubble_ms",
    "update": "update_ms",
    "offload": "offload_wait_ms",
    "loader": "loader_wait_ms",
    "checkpoint": "checkpoint_ms",
    "evaluation": "evaluation_ms",
    "collective": "other_collectives_ms",
    "script": "outside_ms",
    "report": "report_ms",
}


def figures_of(step: RecordedStep, keys: Sequence[Key], header: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each kind that the step has, which add up to those of the step, and where tokens are known this
    rank's ``tokens_per_second`` and ``mfu``."""
    kinds: dict[str, float] = {}
    told = 0.0
    for number, seconds in self_times(step.spans):
        kind = keys[number].kind
        kinds[kind] = kinds.get(kind, 0.0) + seconds
        told += seconds
    kinds["script"] = kinds.get("script", 0.0) + max(0.0, step.seconds - told)
    found = {"step_ms": step.seconds * 1e3}
    found |= {name: kinds[kind] * 1e3 for kind, name in NAMES.items() if kinds.get(kind)}
    if step.tokens and step.seconds > 0:
        found["tokens_per_second"] = step.tokens / step.seconds
        each = header["flops_a_token"] + header["flops_a_token_and_position"] * step.tokens / max(step.samples, 1)
        found["mfu"] = found["tokens_per_second"] * each / header["matrix_rate"]
    return found


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure; a kind that a step does not have counts as 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
