"""Real processes: the command line on real scripts, also on those that fail, hang, or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from ds_hf.autotune import run_from_deepspeed, tune
from ds_hf.cli.root import app
from ds_hf.config import load_config
from ds_hf.host import has_gpu
from ds_hf.measure.protocol import TRIAL_ENV
from tests.autotune.scripts import SLOW_DATA, TOKENS, script

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
ENV = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def command(folder: Path, fault: str = "", *options: str, arguments: tuple[str, ...] = ("--width", "64")) -> list[str]:
    """``ds-hf autotune`` on the script with this fault."""
    (folder / "train.py").write_text(script(fault))
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    tune = [sys.executable, "-m", "ds_hf.cli", "autotune", "--results-dir", str(folder / "results"), *options]
    return [*tune, str(folder / "train.py"), *arguments, "--deepspeed_config", str(folder / "ds_config.json")]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **ENV}, check=False)


def left_behind(folder: Path) -> list[int]:
    """Processes of launches in ``folder`` that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(TRIAL_ENV, "")
        except psutil.Error:
            continue
        if str(folder) in mark and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("fault", "arguments", "said"),
    [
        pytest.param("fails", ("--width", "64"), "ValueError: no such data set: wiki", marks=pytest.mark.slow),
        pytest.param("never calls the engine", ("--width", "64"), "never made an engine", marks=pytest.mark.slow),
        pytest.param("exits without a word", ("--width", "64"), "exit code", marks=pytest.mark.slow),
        pytest.param("", (), "error: the following arguments are required: --width", marks=pytest.mark.slow),
    ],
)
def test_scripts_that_fail_by_themselves(tmp_path: Path, fault: str, arguments: tuple[str, ...], said: str) -> None:
    found = run(command(tmp_path, fault, arguments=arguments))
    assert found.returncode == 1
    assert said in found.stderr.splitlines()[-1]
    assert "with your own file" in found.stderr


@pytest.mark.slow
def test_a_silent_script_shows_where_it_hangs(tmp_path: Path) -> None:
    found = run(command(tmp_path, "hangs", "--stall-timeout", "90s"))  # a busy machine imports for half a minute
    assert found.returncode == 1
    assert "was silent for 90 s" in found.stderr
    assert "train.py" in found.stderr  # the stack
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_processes_share_layers_or_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried, from a file without either, with as many samples a step, though a busy machine expects no gain."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(TOKENS)
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    (tmp_path / "ds.json").write_text(json.dumps({**batch, "zero_optimization": {"stage": 1}}))
    keys = ("tensor_parallel.autotp_size", "sequence_parallel_size")
    kept = ("gradient_checkpointing", "ds_hf.compile")
    script = [str(tmp_path / "train.py"), "--output_dir", str(tmp_path / "out"), "--report_to", "none"]
    script += ["--per_device_train_batch_size", "2", "--max_steps", "40", "--deepspeed", str(tmp_path / "ds.json")]
    files = {"results_dir": tmp_path / "results", "tune": keys, "fix": kept}
    rows = tune(script, processes=2, budget="900s", confirm=False, sampler="exhaustive", **files).table
    assert {(row[keys[0]], row[keys[1]]) for row in rows} == {("1", "1"), ("2", "1"), ("1", "2")}
    for row in rows:
        assert row["outcome"] == "ok", row
        readers = 2 // (int(row[keys[0]]) * int(row[keys[1]]))
        assert int(row["micro"]) * int(row["accumulation"]) * readers == 4
        assert float(row["samples_per_s"]) == pytest.approx(4 / float(row["seconds"]))


@pytest.mark.slow
def test_a_search_from_end_to_end(tmp_path: Path) -> None:
    """Two processes, two settings, a limit that the larger sizes do not fit."""
    options = ("-n", "2", "--budget", "100s", "--trials", "2", "--memory-limit", "6MiB", "--fix", "ds_hf.compile")
    found = run(command(tmp_path, "", *options, arguments=("--width", "256")))
    assert found.returncode == 0, found.stdout + found.stderr
    results = tmp_path / "results"
    tuned = load_config(results / "ds_config.tuned.json", world_size=2)
    assert tuned.train_batch_size == 64
    for name in ("report.html", "trials.csv", "command.txt", "ds_config.tuned.reasons.json", "cmd_optimal.txt"):
        assert (results / name).stat().st_size
    assert "your file:" in found.stdout
    assert "limited by" in found.stdout
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_nothing_fits_the_limit(tmp_path: Path) -> None:
    """Weights alone are 50 KiB. The script's own steps, which no limit stops on a CPU, are no result."""
    found = run(command(tmp_path, "", "--memory-limit", "10KiB"))
    assert found.returncode == 1
    assert "no setting could be measured" in found.stderr
    assert "out of memory at micro-batch 4" in found.stderr
    assert "KiB at micro-batch 1, and there are 10.0 KiB" in found.stderr
    assert not (tmp_path / "results" / "ds_config.tuned.json").exists()


@pytest.mark.slow
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    words = command(tmp_path, "hangs")
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **ENV}
    )
    end = time.monotonic() + 600
    while not left_behind(tmp_path) and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "nothing was written" in errors
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "soon"], "not a valid duration"),
        (["--memory-limit", "much"], "not a valid amount of memory"),
        (["--metric", "joy"], "unknown goal 'joy': throughput, latency"),
        (["--goal", "cost"], "--goal cost needs --price"),
        (["--price", "-1"], "--price must be more than 0"),
        *([] if has_gpu() else [(["--goal", "largest-batch"], "needs --device-memory where there is no GPU")]),
        (["--batch", "64:8"], "is empty"),
        (["--tune", "zero_optimization.stge"], "did you mean zero_optimization.stage"),
        (["--fix", "optimizer.type"], "cannot be tuned or fixed"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], said: str) -> None:
    found = CliRunner().invoke(app, command(tmp_path, "", *options)[3:])
    assert found.exit_code == 2
    assert said in found.stderr
    assert "(top level)" not in found.stderr  # it is not about the file
    assert not (tmp_path / "results" / "trials").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.py", "--deepspeed", "ds_config.json"], "the script no.py does not exist"),
        (["train.py", "--width", "64"], "names no configuration"),
        (["train.py", "--deepspeed", "no.json"], "no.json"),
        (["train.py", "--deepspeed", "auto"], "nothing to tune"),
        (["train.py", "--deepspeed", "faulty.json"], "zero_optimisation"),
    ],
)
def test_bad_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    command(tmp_path)
    (tmp_path / "faulty.json").write_text('{"train_batch_size": 1, "zero_optimisation": {}}')
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["autotune", *words])
    assert found.exit_code == 2
    assert said in found.stderr


@pytest.mark.slow
def test_deepspeed_autotuning_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """``deepspeed --autotuning run``: options come from the file's section, and the training follows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = command(tmp_path)
    section = {"enabled": True, "tuner_num_trials": 1, "results_dir": "found", "max_train_micro_batch_size_per_gpu": 8}
    (tmp_path / "ds_config.json").write_text(json.dumps({**CONFIG, "autotuning": section}))
    assert run_from_deepspeed("run", ["train.py", "--steps", "30", *words[-4:]]) == 0
    printed = capfd.readouterr().out
    assert "trained to the end" in printed
    tuned = load_config(tmp_path / "found" / "ds_config.tuned.json", world_size=1)
    assert tuned.train_batch_size == 32
    assert tuned.train_micro_batch_size_per_gpu is not None
    assert tuned.train_micro_batch_size_per_gpu <= 8
    assert "autotuning" not in tuned.resolved
    assert run_from_deepspeed("guess", ["train.py"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.minutes(3)
def test_a_trainer_that_waits_for_data_gets_workers(tmp_path: Path) -> None:
    """20 ms a sample, 8 samples a step: without workers the script does little but wait."""
    (tmp_path / "train.py").write_text(SLOW_DATA)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {**dict.fromkeys(batch, "auto"), "zero_optimization": {"stage": 1}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    tune = ["autotune", "-n", "1", "--budget", "400s", "--trials", "1", "--results-dir", str(tmp_path / "results")]
    training = ["--output_dir", str(tmp_path / "out"), "--per_device_train_batch_size", "8", "--max_steps", "500"]
    train = [str(tmp_path / "train.py"), *training, "--report_to", "none", "--deepspeed"]
    found = run([sys.executable, "-m", "ds_hf.cli", *tune, *train, str(tmp_path / "ds_config.json")])
    assert found.returncode == 0, found.stdout + found.stderr
    reasons = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())
    changes = {change["key"]: change for change in reasons["changes"]}
    workers = changes["dataloader_num_workers"]["after"]
    assert workers >= 1
    assert "of its time for data" in changes["dataloader_num_workers"]["reason"]
    assert f"--dataloader_num_workers {workers}" in (tmp_path / "results" / "command.txt").read_text()
    assert not left_behind(tmp_path)


def example(tmp_path: Path, config: str) -> list[str]:
    """The example, small, with a file of ours: what the autotuner launches."""
    (tmp_path / "ds_config.json").write_text((EXAMPLES / config).read_text())
    small = ["--vocab_size", "512", "--hidden_size", "64", "--num_hidden_layers", "2", "--block_size", "64"]
    training = ["--output_dir", str(tmp_path / "out"), "--eval_on_start", "False", "--max_steps", "300", *small]
    return [str(EXAMPLES / "train_lm.py"), *training, "--deepspeed", str(tmp_path / "ds_config.json")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learning_rate_in_the_same_command(tmp_path: Path) -> None:
    """``--lr`` on the example, two processes: half of the budget is the search's, half the learning rate's."""
    options = ["--lr", "--budget", "120s", "--trials", "1", "-n", "2", "--no-confirm"]
    tune_it = [sys.executable, "-m", "ds_hf.cli", "autotune", *options, "--results-dir", str(tmp_path / "results")]
    found = run([*tune_it, *example(tmp_path, "ds_config_zero2.json")])
    assert found.returncode == 0, found.stdout + found.stderr
    assert "learning rate, some" in found.stdout
    assert "WarmupDecayLR" in found.stdout
    rate = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())["learning_rate"]
    assert 1e-4 < rate["suggested"] < 0.3  # a small Llama with AdamW: anything else is no answer
    assert rate["interval"][0] < rate["suggested"] < rate["interval"][1]
    arguments = [each["arguments"] for each in rate["advice"]]
    assert all(words[words.index("--learning_rate") + 1] == f"{rate['suggested']:.3g}" for words in arguments if words)
    assert "Learning rate" in (tmp_path / "results" / "report.html").read_text()
    assert not left_behind(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bytes_are_predicted_by_a_trace_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example on two processes: what other stages need is known within 3 % before they are launched."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    limits = {"budget": "150s", "trials": 2, "memory_limit": "64MiB", "confirm": False}
    chosen = {"tune": "zero_optimization.stage", "sampler": "exhaustive"}  # a busy machine expects no gain
    words = example(tmp_path, "ds_config_zero3.json")
    found = tune(words, processes=2, results_dir=tmp_path / "results", **limits, **chosen)
    reasons = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())
    assert reasons["bytes_predicted"].startswith("by a trace of the model")
    others = [row for row in found.table if row["own"] == "False" and row["peak_bytes"]]
    assert others
    for row in others:
        assert float(row["peak_bytes"]) == pytest.approx(float(row["predicted_bytes"]), rel=0.03), row["setting"]


@pytest.mark.slow
def test_a_script_that_tunes_itself(tmp_path: Path) -> None:
    """Under torchrun: the first process searches, both train with the result, and the second time it is found."""
    command(tmp_path)
    (tmp_path / "train.py").write_text(script(tunes_itself=True))
    words = ["train.py", "--width", "64", "--steps", "30", "--deepspeed_config", "ds_config.json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    for _ in range(2):
        found = subprocess.run(
            torchrun, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **ENV}, check=False
        )
        assert found.returncode == 0, found.stdout + found.stderr
        assert found.stdout.count("trains with results/ds_config.tuned.json") == 2
        assert found.stdout.count("trained to the end") == 2
    assert len(list((tmp_path / "results" / "trials").iterdir())) == 1
