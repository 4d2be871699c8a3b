"""Why each key of the tuned file is not as the user had it, and what limits the step that came out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ds_hf.autotune.command import LENGTH
from ds_hf.autotune.division import EXPERTS, PIPE, SEQUENCE, TENSOR, TOKENS
from ds_hf.autotune.options import Metric, gib
from ds_hf.autotune.records import Record
from ds_hf.autotune.space import (
    ACTIVATIONS,
    CAPTURE,
    CHECKPOINTING,
    CHUNKED_LOSS,
    COMMUNICATION,
    COMPILE,
    FP8,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    STAGE,
)
from ds_hf.autotune.study import Search, why_not_divided
from ds_hf.autotune.trial import Point

__all__ = ["MICRO", "STEPS", "Change", "changes_of", "limits_of"]

MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@dataclass(frozen=True)
class Change:
    """One key that is not as the user had it, and why."""

    key: str
    before: Any
    after: Any
    reason: str


def changes_of(search: Search, best: tuple[Record, Point]) -> list[Change]:
    """Every key that differs from the user's, with its reason."""
    record, point = best
    facts = search.own.events["facts"]
    own_size = {MICRO: facts["micro"], STEPS: facts["accumulation"], TOTAL: facts["train_batch"]}
    new_size = {
        MICRO: point.micro,
        STEPS: point.accumulation,
        TOTAL: point.samples,
    }
    changes = [
        Change(name, search.space.own[name], value, _reason(search, best, name))
        for name, value in record.setting.items()
        if value != search.own.setting.get(name)
    ]
    for name in (MICRO, STEPS, TOTAL):
        if own_size[name] != new_size[name]:
            changes.append(Change(name, own_size[name], new_size[name], _batch_reason(search, best, name)))
    if search.launches.seeks_length:
        reason = f"the longest that fit: {gib(point.peak)} at the peak of {gib(search.model.memory or 0)}"
        changes.append(Change(search.command.mappings[LENGTH], search.tokens, point.length, reason))
    return changes


def _batch_reason(search: Search, best: tuple[Record, Point], name: str) -> str:
    record, point = best
    grows = search.options.metric is Metric.BATCH and search.options.high_batch is None
    if name == STEPS and (not grows or point.samples == search.own.events["facts"]["train_batch"]):
        follows = MICRO in search.command.mappings
        return f"keeps the global batch at {point.samples}" + ("" if follows else ", of a loader that follows the file")
    if name == STEPS:
        return "with the micro-batch, which is the global batch now"
    if name == TOTAL:
        way = "grows with the micro-batch" if grows else "inside the interval that you allowed"
        return f"{way}; the learning rate is for the batch that you had (--with-lr finds another)"
    others = sorted((p for p in record.points if p.micro != point.micro), key=search.cost)
    text = f"{gib(point.peak)} at the peak"
    if search.model.memory:
        text += f" of {gib(search.model.memory)}, {1 - point.peak / search.model.memory:.0%} left"
    if others:
        text += f"; {search.cost(others[0]) / search.cost(point):.2f} x better than micro-batch {others[0].micro}"
    too_large = [micro for micro in record.too_large if micro > point.micro]
    text += f"; {min(too_large)} runs out of memory" if too_large else ""
    why = why_not_divided(search.own.events)
    return text + (f"; look before you take it: {why}" if why else "")


def _reason(search: Search, best: tuple[Record, Point], name: str) -> str:
    record, point = best
    value = record.setting[name]
    effect = _effect(search, best, name)
    states = search.model.states(record.setting, point.accumulation)
    room = f" of {gib(search.model.memory)}" if search.model.memory else ""
    before = search.space.own.get(STAGE) or 0
    once = "; gradients are reduced once a step, not every micro-batch" if before > 1 else ""
    whole = "; parameters are not gathered for every micro-batch" if before > 2 else ""
    texts = {
        STAGE: {
            0: f"everything whole on each device takes {gib(states.device)}{room}{once}",
            1: f"optimizer states divided: {gib(states.device)}{room} a device{once}",
            2: f"optimizer states and gradients divided: {gib(states.device)}{room} a device{whole}",
            3: f"parameters divided as well: {gib(states.device)}{room} a device, which leaves room for activations",
        }.get(value, ""),
        OFFLOAD_OPTIMIZER: "optimizer states in host memory make room on the device"
        if value == "cpu"
        else "optimizer states fit on the device, where the update is faster",
        OFFLOAD_PARAM: "parameters in host memory make room on the device"
        if value == "cpu"
        else "parameters fit on the device",
        COMPILE: "compiled blocks compute faster" if value else "eager blocks are faster here",
        FP8: "products in fp8 are faster, and what is computed is rounded to it" if value else "bf16 is as fast here",
        CAPTURE: "blocks in graphs no longer wait for the host" if value else "eager blocks are as fast here",
        CHECKPOINTING: "recomputing activations makes room for a larger micro-batch"
        if value
        else "activations fit, so nothing is computed twice",
        ACTIVATIONS: "inputs of checkpointed blocks in host memory make room on the device"
        if value
        else "inputs of checkpointed blocks fit on the device",
        CHUNKED_LOSS: "logits that are never all there make room" if value else "logits fit on the device",
        COMMUNICATION: f"gradients travel as {value}",
        TENSOR: f"{value} processes share the layers, each with a part of their weights and activations"
        if value != 1
        else "each process computes whole layers, so that nothing is exchanged in them",
        TOKENS: "norms and residuals are computed once, and not by every process that shares the layers"
        if value
        else "whole norms are as fast here",
        PIPE: f"{value} processes have a stretch of the layers each, and send what is between them"
        if value != 1
        else "each process has all layers, and waits for none",
        EXPERTS: {
            0: "experts as transformers computes them",
            1: "all experts of a process in one product, without transformers' own sort and gathers",
        }.get(value, f"experts are divided over {value} processes, and tokens travel"),
        SEQUENCE: f"{value} processes share each sequence, each with the activations of a part of it"
        if value != 1
        else "each process computes whole sequences, so that attention exchanges nothing",
    }
    return "; ".join(part for part in (texts.get(name, ""), effect) if part)


def _effect(search: Search, best: tuple[Record, Point], name: str) -> str:
    """What the key alone does: measured where a launch differs in nothing else, otherwise by the corrected model."""
    record, point = best
    had = json.dumps(search.own.setting[name])
    alone = {**record.setting, name: search.own.setting[name]}
    if search.launches.seeks_length:
        return f"{point.length:,} tokens against {search.longest(alone):,} expected with {had}"
    twin = next((r for r in search.launched() if r.points and r.setting == alone), None)
    if twin is not None:
        other = min(twin.points, key=search.cost)
        return f"{search.cost(other) / search.cost(point):.2f} x against {had}, measured"
    if not search.space.is_legal(alone):
        return ""
    expected = search.model.predict(alone, point.micro, point.accumulation).seconds
    expected *= search.data(record.setting) / search.data(alone)  # as many samples
    return f"{expected / point.seconds:.2f} x against {had}, by the cost model"


def limits_of(search: Search, best: tuple[Record, Point]) -> tuple[dict[str, float], str]:
    """Shares of a step's time in the best setting, and the kind that limits it."""
    record, point = best
    split = record.events.get("split", {})
    update = point.optimizer_seconds / point.seconds if point.seconds else 0.0
    shares = {"optimizer": update}
    rest = 1 - update
    if "compute" in split:
        shares["communication"] = rest * float(split["communication"])
        shares["host"] = rest * float(split["idle"])
        shares["compute"] = max(0.0, 1 - sum(shares.values()))
    else:  # the launch ended before its profile
        shares["forward and backward"] = rest
    own = next((p for p in search.own.points if p.micro == search.own.events["facts"]["micro"]), None)
    if own is not None and search.own.natural:
        natural = sorted(search.own.natural)[len(search.own.natural) // 2]
        outside = max(0.0, natural - own.seconds)
        whole = point.seconds + outside
        shares = {kind: share * point.seconds / whole for kind, share in shares.items()}
        shares["data and script"] = outside / whole
    return shares, max(shares, key=lambda kind: shares[kind])
