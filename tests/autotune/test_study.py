"""The search finds the known optimum of a made-up world, with few trials, and survives what launches do."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hf.autotune import reasons
from ds_hf.autotune.options import Metric, Options
from ds_hf.autotune.records import Record, record_of, value_of
from ds_hf.autotune.result import NothingFits, Result
from ds_hf.autotune.space import STAGE
from ds_hf.autotune.summary import headline
from ds_hf.autotune.trial import LaunchOutcome, Point
from ds_hf.config import load_config
from ds_hf.errors import ConfigError, DsHfError
from tests.autotune.conftest import KEPT
from tests.autotune.world import GLOBAL_MICRO, GLOBAL_STEPS, MIB, WORLD, World
from tests.helpers.browser import faults_of, needs_chromium

Search = Callable[..., Result]
SLOW = pytest.mark.slow
LIMITS = [1_500, 600, *(pytest.param(limit, marks=SLOW) for limit in (100_000, 1_000, 800, 500))]  # MiB


def found(result: Result) -> float:
    return value_of(result.best[1], Metric.THROUGHPUT)


@pytest.mark.parametrize("limit", LIMITS)
def test_optimum_within_5_percent_for_a_quarter_of_the_trials(search: Search, limit: int) -> None:
    world = World(memory=limit * MIB)
    result = search(world)
    grid = world.grid()
    assert found(result) >= 0.95 * max(grid.values())
    whole = World().grid()
    assert world.points <= 0.25 * len(whole)  # measured points, the first launch's included
    assert len(world.launched) <= 10  # of 16 settings; the one that confirms included
    assert result.best[1].peak <= world.memory


def test_global_batch_is_kept(search: Search, tmp_path: Path) -> None:
    result = search(World(memory=900 * MIB))
    tree = json.loads((tmp_path / "results" / "ds_config.tuned.json").read_text())
    assert tree["train_batch_size"] == GLOBAL_MICRO * GLOBAL_STEPS * WORLD
    assert (
        tree["train_micro_batch_size_per_gpu"] * tree["gradient_accumulation_steps"] * WORLD == tree["train_batch_size"]
    )
    assert tree["train_micro_batch_size_per_gpu"] == result.best[1].micro
    assert load_config(tree, world_size=WORLD).train_batch_size == tree["train_batch_size"]
    words = result.words
    assert words[words.index("--per_device_train_batch_size") + 1] == str(result.best[1].micro)
    assert words[words.index("--gradient_accumulation_steps") + 1] == str(result.best[1].accumulation)


def test_every_change_has_a_reason(search: Search, tmp_path: Path) -> None:
    result = search(World(memory=900 * MIB))
    sidecar = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())
    changed = {change["key"] for change in sidecar["changes"]}
    assert {"zero_optimization.stage", "train_micro_batch_size_per_gpu"} <= changed
    assert all(len(change["reason"]) > 10 for change in sidecar["changes"])
    assert sidecar["gain"] == pytest.approx(result.gain)
    assert result.gain == pytest.approx(found(result) / value_of(result.own, Metric.THROUGHPUT))  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "said"), [(0, False), (3, True)])
def test_a_stage_is_praised_for_what_the_users_lacks(before: int, said: bool) -> None:
    """From stage 0 to 1: "gradients are reduced once a step, not every micro-batch", as they were."""
    point = SimpleNamespace(accumulation=4)
    records = (SimpleNamespace(setting={STAGE: 1}, points=[]), point)
    made = SimpleNamespace(
        space=SimpleNamespace(own={STAGE: before}),
        model=SimpleNamespace(states=lambda *_: SimpleNamespace(device=1 << 20), memory=None),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasons, "_effect", lambda *_: "")
        text = reasons._reason(made, records, STAGE)  # type: ignore[arg-type]
    assert "optimizer states divided" in text
    assert ("not every micro-batch" in text) is said


def test_settings_that_cannot_fit_are_not_launched(search: Search, tmp_path: Path) -> None:
    world = World(memory=500 * MIB)  # stage 0 needs 610 MiB for its states alone
    search(world)
    assert not [launch for launch in world.launched if launch["stage"] == 0]
    rows = list(csv.DictReader((tmp_path / "results" / "trials.csv").read_text().splitlines()))
    ruled = [row for row in rows if row["outcome"] == "ruled out"]
    assert {row["zero_optimization.stage"] for row in ruled} >= {"0"}
    assert all("iB at micro-batch" in row["reason"] for row in ruled)


def test_predictions_are_corrected(search: Search) -> None:
    """The world's checkpointing costs 1.25 and not 4/3, its compiled blocks gain 10 % and not 25 %."""
    world = World()
    result = search(world, patience=50, trials=16)
    assert len(world.launched) >= 3
    record, point = result.best
    seconds, nbytes = record.predicted[point.micro]
    assert point.seconds == pytest.approx(seconds, rel=0.25)
    assert point.peak == pytest.approx(nbytes, rel=0.25)


def test_no_gain_keeps_the_users_file(search: Search, words: list[str]) -> None:
    world = World()
    world.seconds = lambda stage, *_: 1.0 + 0.001 * (stage != 3)  # type: ignore[method-assign]
    result = search(world)
    assert result.kept
    assert result.gain == 1.0
    assert not result.changes
    assert result.config["zero_optimization"]["stage"] == 3


def test_a_gain_that_does_not_show_in_the_script_is_none(search: Search) -> None:
    """Started as the user would, the result is slower: the data loader limits it."""
    world = World()
    natural = world.run

    def run(launch, watch):  # type: ignore[no-untyped-def]
        outcome = natural(launch, watch)
        if launch.request.natural_steps and not launch.request.own_axis and launch.request.points != ((2, 16),):
            outcome.natural = [9.0] * 6
        return outcome

    world.run = run  # type: ignore[method-assign]
    result = search(world)
    assert result.kept
    assert "x the time of your file" in result.rejected


@pytest.mark.parametrize(
    "kind", ["crash", "oom", pytest.param("hang", marks=SLOW), pytest.param("timeout", marks=SLOW)]
)
def test_failing_launches_do_not_end_the_search(search: Search, kind: str) -> None:
    world = World(fail={0: kind, 1: kind})
    result = search(world)
    best = max(value for (stage, *_), value in world.grid().items() if stage > 1)
    assert found(result) >= 0.95 * best


def test_own_file_does_not_fit(search: Search) -> None:
    """Micro-batch 2 at stage 3 needs 351 MiB: smaller ones and checkpointing save it."""
    world = World(memory=330 * MIB)
    result = search(world)
    assert result.own is None
    assert not result.kept
    assert result.best[1].peak <= world.memory


def test_nothing_fits(search: Search) -> None:
    with pytest.raises(NothingFits, match="no setting could be measured"):
        search(World(memory=50 * MIB))


def test_killed_search_resumes(search: Search) -> None:
    """What was measured before the kill is not measured again, and the end is the same."""
    world = World(memory=800 * MIB, stays=False)  # where it stays, what fails is launched twice
    fix = (*KEPT, "activation_checkpointing.cpu_checkpointing")  # which the world does not note

    def die(number: int) -> None:
        if number == 2:
            raise MemoryError("killed here")

    world.before = die
    with pytest.raises(MemoryError):
        search(world, fix=fix)
    first = list(world.launched)
    world.before = lambda number: None
    result = search(world, fix=fix)
    again = world.launched[len(first) :]
    assert all(launch not in first for launch in again)
    assert found(result) >= 0.95 * max(world.grid().values())


def test_ctrl_c_leaves_the_best_so_far(search: Search, tmp_path: Path) -> None:
    world = World()

    def interrupt(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    world.before = interrupt
    result = search(world)
    assert result.why_stopped == "interrupted"
    assert (tmp_path / "results" / "ds_config.tuned.json").exists()
    assert (tmp_path / "results" / "report.html").exists()
    assert result.gain >= 1


def test_another_search_in_the_folder_is_refused(search: Search) -> None:
    search(World())
    with pytest.raises(ConfigError, match=r"metric differ.*--force"):
        search(World(), metric=Metric.MEMORY)
    search(World(), metric=Metric.MEMORY, overwrite=True)


@pytest.mark.parametrize("metric", [metric for metric in Metric if metric not in (Metric.BATCH, Metric.LENGTH)])
def test_metrics_go_their_own_way(search: Search, metric: Metric) -> None:
    world = World(memory=2_000 * MIB)
    result = search(world, metric=metric, patience=16)
    point = result.best[1]
    if metric is Metric.MEMORY:
        best = min(world.nbytes(s, on, m) for s in range(4) for on in (True, False) for m in (1, 2, 4, 8, 16, 32))
        assert point.peak <= 1.05 * best
    else:
        assert found(result) >= 0.95 * max(world.grid().values())


@pytest.mark.parametrize("limit", [1_000, 2_000, 12_000])
def test_the_largest_batch(search: Search, limit: int, tmp_path: Path) -> None:
    """Of sizes that are powers of two; the global batch grows where one micro-batch is more than it was."""
    world = World(memory=limit * MIB)
    result = search(world, metric=Metric.BATCH, memory_limit=world.memory, patience=16)
    sizes = [2**power for power in range(11)]
    fitting = [m for m in sizes for s in range(4) for on in (True, False) if world.nbytes(s, on, m) <= world.memory]
    assert result.best[1].micro == max(fitting)
    assert result.best[1].peak <= world.memory
    tree = json.loads((tmp_path / "results" / "ds_config.tuned.json").read_text())
    assert tree["train_batch_size"] == max(GLOBAL_MICRO * GLOBAL_STEPS, max(fitting)) * WORLD
    own = result.own
    said = (tmp_path / "results" / "summary.txt").read_text()
    assert own is not None
    assert f"{max(fitting) * WORLD:,} samples at once" in said
    assert result.gain == pytest.approx(max(fitting) / own.micro, rel=1e-4)


def test_what_it_costs_and_the_settings_between_fast_and_small(search: Search, tmp_path: Path) -> None:
    world = World(memory=2_000 * MIB)
    result = search(world, price=2.0, patience=16)
    said = (tmp_path / "results" / "summary.txt").read_text()
    pace = found(result) * 128
    assert (
        f"{pace:,.0f} tokens/s, {2.0 * WORLD / 3600 / pace * 1e6:.4g} a million tokens at 2 a device and hour" in said
    )
    rows = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())["pareto"]
    with (tmp_path / "results" / "trials.csv").open() as file:
        every = [
            (float(row["samples_per_s"]), int(row["peak_bytes"])) for row in csv.DictReader(file) if row["seconds"]
        ]
    best = {each for each in every if not any(p >= each[0] and m <= each[1] and (p, m) != each for p, m in every)}
    assert {(row["samples_per_s"], row["peak_bytes"]) for row in rows} == best
    assert len(best) > 2
    assert [row["peak_bytes"] for row in rows] == sorted((row["peak_bytes"] for row in rows), reverse=True)
    assert "Time against memory" in (tmp_path / "results" / "report.html").read_text()


def test_interval_for_the_global_batch(search: Search) -> None:
    result = search(World(memory=3_000 * MIB), low_batch=128, high_batch=512)
    assert 128 <= result.config["train_batch_size"] <= 512
    assert result.config["train_batch_size"] > 128


def test_an_interval_in_which_no_batch_is(search: Search) -> None:
    with pytest.raises(ConfigError, match="no global batch from 1 to 3"):
        search(World(), low_batch=1, high_batch=3)


@pytest.mark.parametrize(
    "more",
    [
        {"surveyed": {"means": True}},
        {"together": "contrasts"},
        {"together": "contrasts", "resizable": False},
        {"resizable": False},  # the script's own loss, of which nothing is known
    ],
)
def test_where_gradients_depend_on_the_division_it_stays(more: dict[str, Any], search: Search, tmp_path: Path) -> None:
    """T5 at 8 x 1 trained with an eighth of the gradients of 1 x 8, and that was proposed; CLIP at 8 x 1 compares eight
    pairs in the place of two."""
    world = World(memory=3_000 * MIB, **more)
    result = search(world)
    own = (GLOBAL_MICRO, GLOBAL_STEPS)
    assert {(int(row["micro"]), int(row["accumulation"])) for row in result.table if row["micro"]} == {own}
    tree = json.loads((tmp_path / "results" / "ds_config.tuned.json").read_text())
    assert (tree["train_micro_batch_size_per_gpu"], tree["gradient_accumulation_steps"]) == own
    assert found(result) > 1.02 * value_of(result.own, Metric.THROUGHPUT)  # type: ignore[arg-type]


def test_the_division_is_free_all_the_same_when_named(search: Search) -> None:
    """And where the goal is the size itself; what it means for the gradients is told then."""
    world = World(memory=3_000 * MIB, together="contrasts")
    named = search(world, tune=("train_micro_batch_size_per_gpu",))
    assert len({int(row["micro"]) for row in named.table if row["micro"]}) > 1
    largest = search(world, metric=Metric.BATCH, memory_limit=world.memory, overwrite=True)
    for result in (named, largest):
        (told,) = (each.reason for each in result.changes if each.key == "train_micro_batch_size_per_gpu")
        assert told.endswith("look before you take it: contrasts, so that another division trains something else")


@pytest.mark.parametrize(("fed", "kept"), [((2, 256), True), ((16, 2048), False), ((2, 2048), False)])
def test_a_script_whose_micro_batches_do_not_follow_its_file(search: Search, fed: tuple[int, int], kept: bool) -> None:
    """A loader with 2 written into it trained 2 samples a step where 32 were, and the file was called confirmed. Texts
    that are packed into one row grow instead."""
    world = World(memory=3_000 * MIB)
    run = world.run

    def feeding(launch: Any, watch: Any) -> LaunchOutcome:
        outcome = run(launch, watch)
        micro = json.loads((Path(launch.request.events).parent / "ds_config.json").read_text()).get(
            "train_micro_batch_size_per_gpu"
        )
        samples, elements = (2, 256) if micro in ("auto", 2) else fed
        outcome.events["fed"] = {"samples": samples, "elements": elements}
        return outcome

    world.run = feeding  # type: ignore[method-assign]
    result = search(world, tune=(), fix=(*KEPT, STAGE, "ds_hf.compile", "gradient_checkpointing"))
    assert result.kept is kept
    assert (result.config["train_micro_batch_size_per_gpu"] == GLOBAL_MICRO) is kept
    assert ("stay as they were (2 samples)" in result.rejected) is kept


def test_fixed_stage_stays(search: Search) -> None:
    world = World(memory=2_000 * MIB)
    result = search(world, tune=("gradient_checkpointing",))
    assert {launch["stage"] for launch in world.launched} == {3}
    assert result.config["zero_optimization"]["stage"] == 3


def test_scripts_whose_batch_cannot_be_resized(search: Search) -> None:
    """Every size is a launch of its own, with the script's own options."""
    world = World(memory=1_500 * MIB, resizable=False)
    result = search(world, patience=4, tune=("zero_optimization.stage", "train_micro_batch_size_per_gpu"))
    assert found(result) > 1.2 * value_of(result.own, Metric.THROUGHPUT)  # type: ignore[arg-type]


def test_other_sizes_of_the_users_own_setting_are_launches_too(search: Search) -> None:
    """None was made, and "every setting that can fit was measured"."""
    world = World(memory=100_000 * MIB, resizable=False)
    keys = (STAGE, "ds_hf.compile", "gradient_checkpointing")
    named = ("train_micro_batch_size_per_gpu",)
    result = search(world, tune=named, fix=(*KEPT, *keys), sampler="exhaustive")
    assert {int(row["micro"]) for row in result.table if row["micro"]} == {1, 2, 4, 8, 16, 32}
    assert len(world.launched) == 6
    assert found(result) > 1.2 * value_of(result.own, Metric.THROUGHPUT)  # type: ignore[arg-type]


def test_budget_and_trials_are_limits(search: Search) -> None:
    world = World()
    result = search(world, trials=2)
    assert len(world.launched) == 2
    assert len(world.again) == 2  # the best and the user's file
    assert "2 launches" in result.why_stopped


def test_another_setting_is_no_larger_batch_for_being_faster(search: Search) -> None:
    """Memory is no limit, so every stage holds as many samples: the user's stays."""
    world = World(memory=100_000 * MIB)
    result = search(world, metric=Metric.BATCH, memory_limit=world.memory, high_micro=64, tune=("ds_hf.compile",))
    assert len(world.launched) > 1
    assert result.best[1].micro == 64
    assert result.best[0].own
    assert "ds_hf.compile" not in {change.key for change in result.changes}


def test_a_result_is_a_line_in_a_notebook(search: Search) -> None:
    said = repr(search(World(), trials=2))
    assert said.count("\n") == 0
    assert len(said) < 300
    assert "ds_config.tuned.json" in said


def test_unwritable_folder(search: Search, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write into"):
        search(World(), results_dir=tmp_path / "file" / "results")


def test_script_that_fails_by_itself(search: Search) -> None:
    world = World()
    world.run = lambda launch, watch: __import__("ds_hf.autotune.trial", fromlist=["LaunchOutcome"]).LaunchOutcome(  # type: ignore[method-assign]
        "crash", "exit code 1: ValueError: mine", tail="Traceback ...\nValueError: mine"
    )
    with pytest.raises(DsHfError, match="ValueError: mine") as error:
        search(world)
    assert "Traceback" in error.value.tail  # type: ignore[attr-defined]


def test_script_that_fails_and_does_not_end(search: Search) -> None:
    """axolotl's telemetry waits for ever where there is no network: the error, and not the budget, is what matters."""
    world = World()
    tail = "Traceback (most recent call last):\nValueError: mine\n[posthog] retrying"
    world.run = lambda launch, watch: LaunchOutcome("timeout", "took longer than 90 s", tail=tail)  # type: ignore[method-assign]
    with pytest.raises(DsHfError, match="Its last error is ValueError: mine; if that is not why: give more"):
        search(world, budget=30.0)


def test_two_workers_share_a_search(search: Search) -> None:
    """A second one, started in the folder of the first, repeats nothing."""
    world = World()
    search(world, trials=3)
    launched = len(world.launched)
    search(world, trials=5)
    more = world.launched[launched:]
    assert len(more) <= 2
    assert all(launch not in world.launched[:launched] for launch in more)


def test_workers_confirm_in_folders_of_their_own(search: Search, tmp_path: Path) -> None:
    """Two that came to the end at once read each other's events, and both told the same figures."""
    search(World(), trials=2)
    first = {path.name for path in (tmp_path / "results" / "trials").glob("again*")}
    search(World(), trials=2)
    second = {path.name for path in (tmp_path / "results" / "trials").glob("again*")} - first
    assert second == {f"{name}.2" for name in first}


def test_optuna_reads_the_journal(search: Search, tmp_path: Path) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    result = search(World())
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "results" / "journal.log")))
    study = optuna.load_study(study_name="ds_hf", storage=storage)
    assert study.best_value == pytest.approx(found(result))
    assert any((record := record_of(trial)) and record.own for trial in study.trials)


def test_nothing_is_said_of_what_was_not_measured(search: Search, tmp_path: Path) -> None:
    """One launch, cut off before its profile."""
    result = search(World(), trials=1)
    assert result.limits.keys() == {"optimizer", "forward and backward", "data and script"}
    assert sum(result.limits.values()) == pytest.approx(1)
    report = (tmp_path / "results" / "report.html").read_text()
    assert "Importance of the keys" not in report
    assert " of them to confirm" in report


def test_importance_of_the_keys_that_were_varied(search: Search, tmp_path: Path) -> None:
    search(World())
    assert "Importance of the keys" in (tmp_path / "results" / "report.html").read_text()


def test_the_learning_rates_curves_are_in_the_report(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for one is made up; both pages draw it with the same sections."""
    from tests.autotune.lr.test_report import searched

    monkeypatch.setattr("ds_hf.autotune.run.find", lambda *_: searched())
    search(World(), lr=True, trials=1)
    report = (tmp_path / "results" / "report.html").read_text()
    for title in ("Learning rate", "How to use it", "Range test", "Confirming runs"):
        assert f"<h2>{title}</h2>" in report
    assert len(report) < 1_500_000


@needs_chromium
@SLOW
def test_the_report_in_a_browser(search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a search that varied keys, kept others, and found a learning rate."""
    from tests.autotune.lr.test_report import searched

    monkeypatch.setattr("ds_hf.autotune.run.find", lambda *_: searched())
    search(World(memory=900 * MIB), lr=True)
    assert faults_of(tmp_path / "results" / "report.html", "autotune") == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ((2.0, 1.0), "Faster than your file, confirmed; by how much is not certain on this machine (1.1 to 1.9 x in"),
        ((1.0, 1.4), "Faster in the engine, confirmed (1.1 to 1.9 x); the whole script 0.71 x: not seen to be faster"),
    ],
)
def test_a_script_that_looks_slower_is_not_called_faster(script: tuple[float, float], said: str) -> None:
    """Not by more than the noise: then the user's file would stay."""
    point = Point(1, 1, 1.0, 0.9, 1.1, 0)
    record = Record(0, {}, "ok", points=(point,))
    result = Result((record, point), point, False, 1.4, {}, (1.06, 1.88), trusted=True, script=script)
    launches = SimpleNamespace(seeks_length=False)
    search: Any = SimpleNamespace(options=Options(), launches=launches)
    assert headline(search, result).startswith(said)
