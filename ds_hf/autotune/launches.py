"""How a search starts the user's script: folder, configuration, request and command of each launch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hf.autotune.command import Command
from ds_hf.autotune.options import Options
from ds_hf.autotune.space import CHECKPOINTING, WORKERS, Setting, config_of
from ds_hf.autotune.trial import Launch, Outcome, Point, Watch, launch_words
from ds_hf.config.types import Config
from ds_hf.measure.protocol import TrialRequest
from ds_hf.measure.statistics import summarise

__all__ = ["NATURAL_STEPS", "Launches", "Problem", "Run"]

NATURAL_STEPS = 6
LEAST_SECONDS = 30.0  # for a launch when the budget is nearly spent

Run = Callable[[Launch, "Watch | None"], Outcome]


@dataclass(frozen=True)
class Problem:
    """What is tuned: the user's command and file, and how; ``processes`` on this host."""

    command: Command
    config: Config
    options: Options
    processes: int


class Launches:
    """Starts launches of one problem.

    Args:
        run: what really starts one; tests give another.
    """

    def __init__(self, problem: Problem, run: Run) -> None:
        self.problem, self.options, self.command, self.run = problem, problem.options, problem.command, run
        self.tree = problem.config.resolved
        self.started = time.monotonic()

    def own(self, watch: Watch) -> Outcome:
        """The user's command with the user's values; the engine alone knows yet which batch that is."""
        name = "0000-own"
        request = self._request(name, survey=True, own_axis=True, natural_steps=NATURAL_STEPS,
                                low_micro=self.options.low_micro, high_micro=self.options.high_micro)  # fmt: skip
        config = self._write_config(name, config_of(self.tree, {}))
        outcome = self._launch(name, self.command.words(config), request, watch)
        facts = outcome.events.get("facts", {})
        if facts and facts["micro"] in outcome.too_large:  # its own steps may have crossed a limit that nothing keeps
            outcome.natural, outcome.waits = [], []
            outcome.kind, outcome.reason = "oom", f"out of memory at micro-batch {facts['micro']}"
        return outcome if outcome.points or not facts else _from_natural(outcome, facts["micro"], facts["accumulation"])

    def replayed(
        self,
        name: str,
        setting: Setting,
        sizes: list[tuple[int, int]],
        best: float | None,
        watch: Watch,
        *,
        longest: bool = True,
    ) -> Outcome:
        """All sizes of a setting in one launch, which resizes the script's batch.

        Args:
            best: seconds a sample so far. longest: look for the longest samples, which takes time.
        """
        request = self._request(name, points=tuple(sizes), gradient_checkpointing=setting.get(CHECKPOINTING), best=best,
                                longest=longest)  # fmt: skip
        config = self._write_config(name, config_of(self.tree, setting))
        return self._launch(name, self.command.words(config), request, watch)

    def natural(
        self, name: str, setting: Setting, size: tuple[int, int], world_size: int, workers: int | None = None
    ) -> Outcome:
        """The script as the user would start it with the result; its own steps become the point.

        Args:
            workers: of the script's DataLoader; ``None``: as the script has it.
        """
        values: dict[str, object] = {"train_micro_batch_size_per_gpu": size[0], "gradient_accumulation_steps": size[1]}
        if CHECKPOINTING in setting:
            values[CHECKPOINTING] = setting[CHECKPOINTING]
        if workers is not None:
            values[WORKERS] = workers
        config = self._write_config(name, self.final_config(setting, size, world_size))
        request = self._request(name, natural_steps=NATURAL_STEPS)
        return _from_natural(self._launch(name, self.command.words(config, values), request, None), *size)

    def each_natural(self, name: str, setting: Setting, sizes: list[tuple[int, int]], world_size: int) -> Outcome:
        """One launch a size, where the engine cannot resize the script's batch."""
        total = Outcome("oom")
        for size in sizes:
            part = self.natural(f"{name}-{size[0]}", setting, size, world_size)
            total.seconds += part.seconds
            total.points += part.points
            if part.kind == "oom":
                total.too_large.append(size[0])
            if part.kind == "ok" or not total.points:
                total.kind, total.reason, total.tail = part.kind, part.reason, part.tail
        return total

    def final_config(self, setting: Setting, size: tuple[int, int], world_size: int) -> dict[str, Any]:
        """The configuration of a setting with its batch written out."""
        batch = dict(zip(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), size, strict=True))
        return {**config_of(self.tree, setting), **batch, "train_batch_size": size[0] * size[1] * world_size}

    def _request(self, name: str, **asked: Any) -> TrialRequest:
        options = self.options
        return TrialRequest(
            events=str((self._folder(name) / "events.jsonl").resolve()),
            memory_limit=options.memory_limit,
            steps=options.steps,
            point_seconds=min(options.point_seconds, max(2.0, options.budget / 60)),
            **asked,
        )

    def _launch(self, name: str, words: list[str], request: TrialRequest, watch: Watch | None) -> Outcome:
        options = self.options
        whole = launch_words(options.launcher, self.problem.processes, words)
        left = options.budget - (time.monotonic() - self.started)
        timeout = min(options.trial_timeout, max(LEAST_SECONDS, left))
        return self.run(Launch(whole, self._folder(name), request, timeout, options.stall_timeout), watch)

    def _folder(self, name: str) -> Path:
        return self.options.results_dir / "trials" / name

    def _write_config(self, name: str, tree: dict[str, Any]) -> Path:
        folder = self._folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / "ds_config.json").resolve()
        path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")
        return path


def _from_natural(outcome: Outcome, micro: int, accumulation: int) -> Outcome:
    """The script's own steps as a point."""
    if outcome.natural and not outcome.points:
        found = summarise(outcome.natural)
        peak = int(outcome.events.get("peak", {}).get("nbytes", 0))
        outcome.points.append(Point(micro, accumulation, found.median, found.low, found.high, peak, 0.0, found.steps))
    return outcome
