"""Training that is recorded, and what was recorded, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hf import Engine, initialize
from ds_hf.engine.observe.report import attach
from ds_hf.engine.observe.report.files import rank_path
from ds_hf.engine.observe.report.spans import Key, Span, self_times
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config

__all__ = ["Recorded", "make_engine", "read_rank", "train"]


@dataclass
class Recorded:
    """One rank's file."""

    header: dict[str, Any]
    keys: dict[int, Key] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def spans(self, step: dict[str, Any]) -> list[tuple[Key, Span]]:
        return [(self.keys[k], Span(k, a / 1e6, b / 1e6, d)) for k, a, b, d in step["spans"]]

    def by_kind(self, step: dict[str, Any]) -> dict[str, float]:
        """Own seconds of each kind."""
        found: dict[str, float] = {}
        for key, seconds in self_times([span for _, span in self.spans(step)]):
            found[self.keys[key].kind] = found.get(self.keys[key].kind, 0.0) + seconds
        return found

    def by_place(self, step: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, seconds in self_times([span for _, span in self.spans(step)]):
            found[self.keys[key].place] = found.get(self.keys[key].place, 0.0) + seconds
        return found


def read_rank(folder: Path, rank: int = 0) -> Recorded:
    lines = [json.loads(line) for line in rank_path(folder, rank).read_text("utf-8").splitlines()]
    found = Recorded(lines[0])
    for line in lines[1:]:
        if "keys" in line:
            found.keys.update({int(number): Key(*key) for number, key in line["keys"].items()})
        elif "step" in line:
            found.steps.append(line)
        found.ended |= "end" in line
    return found


def make_engine(
    stage: int,
    folder: Path | None,
    model: nn.Module | None = None,
    *,
    ds_hf: dict[str, Any] | None = None,
    page: bool = False,
    **more: Any,
) -> Engine:
    attach.makes_pages = page
    section = {"join_blocks": False, **(ds_hf or {})}
    if folder is not None:
        section |= {"report": str(folder), "report_steps": "all"}
    torch.manual_seed(0)
    model = model or TinyLM(width=64, depth=3)
    engine: Engine = initialize(model=model, config=base_config(stage, ds_hf=section, **more))[0]
    return engine


def train(engine: Engine, steps: int, each: Callable[[int], None] = lambda step: None) -> list[float]:
    """Losses."""
    losses = []
    for step in range(steps):
        for micro in range(engine.batch.accumulation_steps):
            loss = engine(token_batches(engine.batch.micro, 16, seed=10 * step + micro))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        each(step)
    return losses
