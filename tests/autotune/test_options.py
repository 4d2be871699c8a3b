"""Options: units, DeepSpeed's section, and the user's command line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_hf.autotune.command import Command, found_program, split_launcher
from ds_hf.autotune.options import Metric, Options, nbytes_of, seconds_of
from ds_hf.autotune.space import points
from ds_hf.config.load import examine
from ds_hf.errors import ConfigError


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 m ", 120)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2**31), ("500MB", 500_000_000), ("80g", 80 * 2**30), ("1.5KiB", 1536), ("7", 7), ("7B", 7)],
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes


def test_a_duration_without_a_unit_asks_for_one() -> None:
    with pytest.raises(ConfigError, match="'2' has no unit: write 2s, 2m or 2h"):
        seconds_of("2")


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", "1d", "1 2"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="not a valid duration"):
        seconds_of(text)


def test_section_of_the_file_wins_over_defaults_and_not_over_the_command_line() -> None:
    section = {"metric": "latency", "tuner_num_trials": 7, "results_dir": "there", "arg_mappings": {"a": "b"}}
    config = examine({"train_batch_size": 8, "autotuning": section}, world=None, allow_auto=True)
    found = Options().with_section(config)
    assert (found.metric, found.trials, found.results_dir) == (Metric.LATENCY, 7, Path("there"))
    assert found.patience == Options().patience  # the section's own default is not the user's wish
    assert found.arg_mappings == {"a": "b"}
    given = Options(trials=3, results_dir=Path("here")).with_section(config)
    assert (given.trials, given.results_dir, given.metric) == (3, Path("here"), Metric.LATENCY)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    ("line", "launcher", "rest"),
    [
        ("train.py --lr 1", "", "train.py --lr 1"),
        ("python train.py", "", "python train.py"),
        ("torchrun --nproc-per-node 2 train.py a.py", "torchrun --nproc-per-node 2", "train.py a.py"),
        ("accelerate launch --config_file c.yaml train.py", "accelerate launch --config_file c.yaml", "train.py"),
        ("accelerate launch -m pkg.train --lr 1", "accelerate launch", "-m pkg.train --lr 1"),
        ("/v/bin/deepspeed --num_gpus 2 train.py", "/v/bin/deepspeed --num_gpus 2", "train.py"),
        ("python3.12 -m torch.distributed.run train.py", "python3.12 -m torch.distributed.run", "train.py"),
        ("python -m pkg.train", "", "python -m pkg.train"),
        ("trl sft --learning_rate 1", "", "-m trl.scripts.sft --learning_rate 1"),
        ("trl vllm-serve", "", "-m trl.scripts.vllm_serve"),
        ("llamafactory-cli train a.yaml b=1", "", "-m llamafactory.launcher a.yaml b=1"),
        ("/v/bin/axolotl train a.yaml", "", "-m axolotl.cli.train a.yaml"),
    ],
)
def test_lines_of_launchers(line: str, launcher: str, rest: str) -> None:
    assert split_launcher(line.split()) == (launcher.split(), rest.split())


def test_a_launcher_needs_a_script() -> None:
    with pytest.raises(ConfigError, match=r"no script behind accelerate launch: it is what ends in \.py"):
        split_launcher(["accelerate", "launch", "--num_processes", "2"])


def test_a_program_of_an_environment_that_is_not_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_program(["torchrun", "train.py"]) == [str(folder / "torchrun"), "train.py"]
    for missing in ("no-such-launcher", str(tmp_path / "torchrun")):
        with pytest.raises(ConfigError, match=f"no program {missing} on the PATH or in {folder}"):
            found_program([missing, "train.py"])
    (tmp_path / "torchrun").write_text("#!/bin/sh\n")
    (tmp_path / "torchrun").chmod(0o755)
    assert found_program(["torchrun"]) == ["torchrun"]
    assert found_program([]) == []


@pytest.mark.parametrize(
    "launcher",
    ["--use_deepspeed --deepspeed_config_file a.json", "--deepspeed-config-file=a.json", "--config_file c.yaml", ""],
)
def test_the_file_of_accelerate_launch(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch names its own behind the user's: of several the last counts, also against accelerate's own file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    Path("train.py").touch()
    Path("accelerate").mkdir()
    for own in ("c.yaml", "accelerate/default_config.yaml"):
        Path(own).write_text("deepspeed_config:\n  deepspeed_config_file: a.json\n")
    words = ["train.py", "--gradient_accumulation_steps", "2"]
    command = Command.parse(words, launcher=["accelerate", "launch", *launcher.split()])
    assert command.config == "a.json"
    made = command.words("b.json", {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 1})
    assert made == ["--deepspeed_config_file", "b.json", "train.py", "--gradient_accumulation_steps", "4"]
    assert not command.is_trainer
    assert command.loads_as_it_is
    batch = {"train_micro_batch_size_per_gpu": "batch"}
    assert not Command.parse(words, batch, ["accelerate", "launch", *launcher.split()]).loads_as_it_is
    assert Command.parse([*words, "--deepspeed", "s.json"], launcher=["accelerate", "launch"]).config == "s.json"


def test_without_a_file_of_accelerate_it_is_said_where_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    Path("train.py").touch()
    Path("c.yaml").write_text("deepspeed_config:\n  zero_stage: 2\n")
    with pytest.raises(ConfigError, match=r"--deepspeed_config_file ds_config\.json after accelerate launch"):
        Command.parse(["train.py"], launcher=["accelerate", "launch", "--config_file", "c.yaml"])


def test_of_an_option_that_is_given_twice_the_last_counts(tmp_path: Path) -> None:
    """As argparse does, and with dashes, which transformers takes: the search must change what the script reads."""
    script = tmp_path / "train.py"
    script.touch()
    words = ["--deepspeed", "a.json", "--per_device_train_batch_size", "2", "--deepspeed", "b.json"]
    command = Command.parse([str(script), *words, "--per-device-train-batch-size=4", "--gradient-checkpointing"])
    assert (command.config, command.given("train_micro_batch_size_per_gpu")) == ("b.json", "4")
    assert command.given_flag("gradient_checkpointing") is True
    found = command.words("c.json", {"train_micro_batch_size_per_gpu": 8, "gradient_checkpointing": False})
    assert found[1:] == [
        "--deepspeed", "a.json", "--per_device_train_batch_size", "2", "--deepspeed", "c.json",
        "--per-device-train-batch-size=8", "--gradient-checkpointing", "False",
    ]  # fmt: skip


def test_arguments_of_a_trainer_are_replaced_or_added(script: str) -> None:
    command = Command.parse([script, "--gradient_accumulation_steps=4", "--deepspeed", "a.json", "--fp16"])
    values = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    assert command.config == "a.json"
    assert command.words("b.json", values) == [
        script, "--gradient_accumulation_steps=2", "--deepspeed", "b.json", "--fp16",
        "--per_device_train_batch_size", "8", "--gradient_checkpointing", "True",
    ]  # fmt: skip


def test_bare_flags_and_inline_configurations(script: str) -> None:
    command = Command.parse([script, "--gradient_checkpointing", "--deepspeed=a.json"])
    assert command.given_flag("gradient_checkpointing") is True
    words = command.words("b.json", {"gradient_checkpointing": False})
    assert words == [script, "--gradient_checkpointing", "False", "--deepspeed=b.json"]


def test_a_script_of_ones_own_gets_only_what_is_mapped(script: str) -> None:
    words = [script, "--deepspeed", "--deepspeed_config", "a.json", "--batch", "4"]
    command = Command.parse(words, {"train_micro_batch_size_per_gpu": "batch"})
    values = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    assert command.words("b.json", values) == [script, "--deepspeed", "--deepspeed_config", "b.json", "--batch", "8"]


def test_arguments_in_a_file(script: str, tmp_path: Path) -> None:
    """Each launch has a copy with its own values; comments and the user's file stay where they are."""
    own = tmp_path / "lf.yaml"
    text = "# mine\ndeepspeed: ds.json\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-3\ndataset: 'über'\n"
    own.write_text(text, "utf-8")
    command = Command.parse([script, "--config", str(own), "--gradient_accumulation_steps", "4"])
    assert (command.config, command.given("train_micro_batch_size_per_gpu")) == ("ds.json", "2")
    assert command.given("gradient_accumulation_steps") == "4"
    values = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": True}
    (tmp_path / "trial").mkdir()
    config = tmp_path / "trial" / "ds_config.json"
    words = command.words(config, values)
    copy = tmp_path / "trial" / "arguments.yaml"
    assert words == [script, "--config", str(copy), "--gradient_accumulation_steps", "1"]
    assert yaml.safe_load(copy.read_text("utf-8")) == {
        "deepspeed": str(config), "per_device_train_batch_size": 8, "learning_rate": 1e-3, "dataset": "über",
        "gradient_accumulation_steps": 1, "gradient_checkpointing": True,
    }  # fmt: skip
    assert own.read_text("utf-8") == text
    other = Command.parse([script, f"--config={own}", "per_device_train_batch_size=3"])  # as OmegaConf takes it
    assert other.given("train_micro_batch_size_per_gpu") == "3"
    words = other.words(config, {"train_micro_batch_size_per_gpu": 4})
    assert words == [script, f"--config={copy}", "per_device_train_batch_size=4"]
    assert other.signature != command.signature
    own.write_text(text.replace("ds.json", "other.json"), "utf-8")
    assert Command.parse([script, f"--config={own}", "per_device_train_batch_size=3"]).signature == other.signature


def test_names_of_axolotl_and_llama_factory(script: str, tmp_path: Path) -> None:
    own = tmp_path / "arguments.yaml"
    own.write_text("deepspeed: ds.json\nmicro_batch_size: 2\n")
    command = Command.parse([script, str(own)])
    assert command.given("train_micro_batch_size_per_gpu") == "2"
    with pytest.raises(ConfigError, match="is your own file"):
        command.words(tmp_path / "ds_config.json")
    factory = Command.parse(["-m", "llamafactory.launcher", str(own)])
    assert "gradient_checkpointing" in command.mappings
    assert "gradient_checkpointing" not in factory.mappings  # there it is disable_gradient_checkpointing


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "file of arguments cannot be read"),
        ("- deepspeed", "names no configuration"),
        ("a: 1", "names no configuration"),
        ("deepspeed: {stage: 3}", "names no configuration"),
    ],
)
def test_bad_files_of_arguments(script: str, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Command.parse([script, str(tmp_path / "a.yaml")])


def test_sizes_keep_the_global_batch() -> None:
    assert points(Options(), 4, (3, 4)) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert points(Options(low_micro=2, high_micro=4), 4, (3, 4)) == [(2, 6), (3, 4), (4, 3)]
    assert points(Options(fix=("train_micro_batch_size_per_gpu",)), 4, (3, 4)) == [(3, 4)]
    for micro, steps in points(Options(low_batch=40, high_batch=70), 4, (3, 4)):
        assert 40 <= micro * steps * 4 <= 70
    allowed = Options(low_batch=40, high_batch=70)  # the global batch is 48; what is fixed was alone in the interval
    assert points(replace(allowed, fix=("train_micro_batch_size_per_gpu",)), 4, (3, 4)) == [(3, 5)]
    assert points(replace(allowed, fix=("gradient_accumulation_steps",)), 4, (3, 4)) == [(3, 4), (4, 4)]


def test_options_take_the_texts_and_names_of_the_command_line() -> None:
    given = Options().changed(
        budget="10m", goal="tokens", output="here", device_memory="2GiB", tune="ds_hf.compile", force=True,
        launcher="srun -N 2",
    )  # fmt: skip
    assert given == Options(
        budget=600.0, results_dir=Path("here"), memory_limit=2**31, tune=("ds_hf.compile",), overwrite=True,
        launcher=("srun", "-N", "2"),
    )  # fmt: skip
    assert Options(metric=Metric.MEMORY).changed(goal="cost", price=2.5).metric is Metric.THROUGHPUT
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"bugdet": 30}, "did you mean budget"),
        ({"goal": "fast"}, "unknown goal 'fast': throughput, "),
        ({"goal": "cost"}, "needs --price"),
        ({"budget": "soon"}, "not a valid duration"),
    ]
    for changes, said in wrong:
        with pytest.raises(ConfigError, match=said):
            Options().changed(**changes)
