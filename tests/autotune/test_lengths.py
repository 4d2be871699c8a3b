"""``--goal longest-sequence``: in a world with known answers, on a real script, and what is refused before a launch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ds_hf.autotune.command import LENGTH, Command, split_launcher
from ds_hf.autotune.footprint import TracedAhead
from ds_hf.autotune.lengths import with_option
from ds_hf.autotune.options import Metric
from ds_hf.autotune.result import Result
from ds_hf.errors import ConfigError
from tests.autotune.world import GLOBAL_MICRO, GLOBAL_STEPS, MIB, WORLD, World
from tests.helpers.browser import faults_of, needs_chromium
from tests.helpers.pages import without_breaks

Search = Callable[..., Result]
OWN, STEP = 128, 16


class LongWorld(World):
    """Activations grow with the tokens of a sequence."""

    def run(self, launch: Any, watch: Any) -> Any:
        self.request, self.words = launch.request, list(launch.words)
        return super().run(launch, watch)

    def longest(self, stage: int, checkpointing: bool, micro: int) -> int:
        each = self.nbytes(stage, checkpointing, micro) - self.nbytes(stage, checkpointing, 0)
        room = self.memory - self.nbytes(stage, checkpointing, 0)
        return max(0, int(room / each * OWN)) // STEP * STEP

    def point(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> dict[str, Any]:
        length = self.longest(stage, checkpointing, micro)
        if self.request.exactly:
            assert self.request.length <= length
            length = self.request.length
        if length == 0:
            return {"event": "point", "micro": micro, "accumulation": steps, "peak": 0, "outcome": "oom", "reason": ""}
        seconds = self.seconds(stage, checkpointing, compiled, micro, steps) * length / OWN
        return {"event": "point", "micro": micro, "accumulation": steps, "outcome": "ok", "peak": self.memory,
                "seconds": seconds, "low": seconds, "high": seconds, "optimizer_seconds": 0.0, "steps": 2,
                "length": length}  # fmt: skip

    def sizes(self) -> dict[int, int]:
        return {self.micro: self.steps, 1: self.micro * self.steps}

    def survey(self, stage: int) -> dict[str, Any]:
        return super().survey(stage) | {"length": 0}

    def facts(self) -> dict[str, Any]:
        model = {"class": "Own", "config": {"max_position_embeddings": 1024}, "attention": "sdpa"}
        return super().facts() | {"model": model}


class Telling(LongWorld):
    """Says what its own batch is."""

    said: dict[str, Any] = {"own": OWN, "step": STEP, "most": None}  # noqa: RUF012

    def run(self, launch: Any, watch: Any) -> Any:
        outcome = super().run(launch, watch)
        outcome.events["length"] = {"event": "length", **self.said}
        return outcome


def test_where_samples_count_together_the_micro_batch_stays(search: Search, words: list[str]) -> None:
    """A contrastive loss of one sample is 0; the least micro-batch has the longest sequences."""
    world = Telling(memory=1_000 * MIB, together="contrasts")
    words += ["--max_length", str(OWN)]
    result = search(world, metric=Metric.LENGTH, memory_limit=world.memory)
    assert {point.micro for record in [result.best[0]] for point in record.points} == {GLOBAL_MICRO}
    assert result.config["train_micro_batch_size_per_gpu"] == GLOBAL_MICRO


def length_in(words: list[str], option: str = "--max_length") -> int:
    return int(words[words.index(option) + 1])


def test_the_longest_of_all_settings(
    search: Search, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TracedAhead, "on_event")  # no thread traces beside
    world = Telling(memory=1_000 * MIB)
    words += ["--max_length", "256"]
    result = search(world, metric=Metric.LENGTH, memory_limit=world.memory, patience=16)
    best = max(world.longest(stage, on, 1) for stage in range(4) for on in (True, False))
    assert result.best[1].length == best
    assert result.trusted
    assert length_in(result.words) == best == length_in(world.words)  # it was confirmed so
    own = result.own
    assert own is not None
    assert own.length == world.longest(3, False, GLOBAL_MICRO)
    folder = tmp_path / "results"
    tree = json.loads((folder / "ds_config.tuned.json").read_text())
    assert tree["train_batch_size"] == GLOBAL_MICRO * GLOBAL_STEPS * WORLD
    assert tree["train_micro_batch_size_per_gpu"] == 1
    reasons = json.loads((folder / "ds_config.tuned.reasons.json").read_text())
    assert {"--max_length"} <= {change["key"] for change in reasons["changes"]}
    assert max(row["tokens"] for row in reasons["pareto"]) == best
    report = without_breaks((folder / "report.html").read_text())
    said = f"Sequences of {best:,} tokens fit with {folder}/ds_config.tuned.json, where your file holds {own.length:,}"
    assert f"{said}: confirmed" in report
    assert "The longest sequences" in report
    assert "Time against length" in report
    assert "the model was made for 1,024" in (folder / "summary.txt").read_text()
    assert len(world.launched) < 8  # by the memory model, not by trying each


def test_a_table_of_positions_is_the_limit(
    search: Search, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user's file holds as many, no other can hold more, and none is launched."""
    monkeypatch.delattr(TracedAhead, "on_event")

    class Tabled(Telling):
        said: ClassVar = {"own": OWN, "step": STEP, "most": OWN + STEP}

        def longest(self, stage: int, checkpointing: bool, micro: int) -> int:
            return min(super().longest(stage, checkpointing, micro), OWN + STEP)

    world = Tabled(memory=100_000 * MIB)
    words += ["--max_length", str(OWN)]
    result = search(world, metric=Metric.LENGTH, memory_limit=world.memory)
    assert result.best[1].length == OWN + STEP
    assert len(world.launched) == 1
    assert "all that the model's table of positions has" in (tmp_path / "results" / "summary.txt").read_text()
    said = f"fit with your own file ({words[words.index('--deepspeed') + 1]}): confirmed"
    assert said in without_breaks((tmp_path / "results" / "report.html").read_text())


@needs_chromium
@pytest.mark.slow
def test_the_report_in_a_browser(
    search: Search, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TracedAhead, "on_event")
    world = Telling(memory=1_000 * MIB)
    words += ["--max_length", "256"]
    search(world, metric=Metric.LENGTH, memory_limit=world.memory, patience=16)
    assert faults_of(tmp_path / "results" / "report.html", "autotune-lengths") == []


def test_what_was_measured_is_not_for_other_searches(search: Search, words: list[str]) -> None:
    words += ["--max_length", "256"]
    world = Telling(memory=1_000 * MIB)
    search(world, metric=Metric.LENGTH, memory_limit=world.memory, trials=2)
    fastest = search(World(memory=2_000 * MIB), overwrite=True, trials=1)
    assert fastest.best[1].length == 0


@pytest.mark.parametrize(
    ("said", "options", "fault"),
    [
        ({"why": "the batch has no tokens"}, ["--max_length", "256"], "cannot be made longer: the batch has no tokens"),
        (
            {"own": OWN, "step": STEP},
            ["--max_length", "64"],
            "--max_length is 64, and the script's batch has sequences",
        ),
        ({"own": OWN, "step": STEP}, [], "it is not known which option of the script sets the length"),
        ({"own": OWN, "step": STEP}, ["--max_length", "256", "--block_size", "9"], "--max_length and --block_size are"),
    ],
)
def test_what_is_refused(
    search: Search, words: list[str], said: dict[str, Any], options: list[str], fault: str
) -> None:
    words += options
    world = Telling(memory=1_000 * MIB)
    world.said = said
    with pytest.raises(ConfigError, match="--goal longest-sequence") as caught:
        search(world, metric=Metric.LENGTH, memory_limit=world.memory)
    assert fault in str(caught.value)
    assert len(world.launched) <= 1


@pytest.mark.parametrize(
    ("line", "named", "option"),
    [
        ("train.py --block_size 128", None, "--block_size"),
        ("train.py --max-seq-length=128", None, "--max_seq_length"),
        ("train.py --tokens 128", "--tokens", "--tokens"),
        ("train.py --tokens 128", "tokens", "--tokens"),
        ("trl sft --model_name_or_path m", None, "--max_length"),
        ("axolotl train ax.yaml", None, "--sequence_len"),
    ],
)
def test_which_option_sets_the_length(
    line: str, named: str | None, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("ax.yaml").write_text("sequence_len: 512\ndeepspeed: ds.json\n")
    given = [] if "yaml" in line else ["--deepspeed", "ds.json"]
    command = with_option(Command.parse(split_launcher([*line.split(), *given])[1]), named)
    assert command.mappings[LENGTH] == option
    made = command.words(tmp_path / "ds2.json", {LENGTH: 999})
    text = (tmp_path / "arguments.yaml").read_text() if not given else " ".join(made)
    assert "999" in text


def test_of_arg_mappings() -> None:
    command = Command(("train.py",), ("--deepspeed", "x"), 1, False, {LENGTH: "--mine"})
    assert with_option(command, None) is command
