"""``--deepspeed auto``: the choice, where the model's size comes from, and what ends up in the plugin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ds_hf.engine.zero.estimate import ModelSize
from ds_hf.hf import auto
from ds_hf.hf.auto import STATES_SHARE, Memory, choose, model_on_command_line

GIB = 2**30
SEVEN_B = ModelSize(total=7 * 10**9, trainable=7 * 10**9, largest_unit=2 * 10**8)


def chosen(device_gib: float, world_size: int, host_gib: float = 2000, offload: bool = True) -> str:
    memory = Memory(int(device_gib * GIB), int(host_gib * GIB))
    return choose(SEVEN_B, memory, world_size, dtype="bfloat16", accumulates=False, offload=offload).preset


@pytest.mark.parametrize(
    ("device_gib", "world_size", "preset"),
    [
        (160, 8, "zero0"),  # 16 bytes x 7 B = 104 GiB <= 70 % of 160
        (80, 8, "zero1"),  # 4 + 12/8 bytes x 7 B = 36 GiB
        (48, 8, "zero2"),  # 2 + 14/8 bytes x 7 B = 24.4 GiB and a unit
        (24, 8, "zero3"),  # 16/8 bytes x 7 B = 13.0 GiB, two units and a gradient
        (24, 1, "zero2-offload"),  # 2 bytes x 7 B = 13 GiB on the device, the rest on the host
        (10, 1, "zero3-offload"),
    ],
)
def test_the_smallest_that_fits(device_gib: float, world_size: int, preset: str) -> None:
    assert chosen(device_gib, world_size) == preset


def test_candidates_are_looked_at_in_order_and_the_choice_fits() -> None:
    memory = Memory(24 * GIB, 2000 * GIB)
    choice = choose(SEVEN_B, memory, 8, dtype="bfloat16", accumulates=False, offload=True)
    assert list(choice.needs) == ["zero0", "zero1", "zero2", "zero3"]
    assert choice.fits
    assert choice.needs["zero3"].device <= STATES_SHARE * memory.device < choice.needs["zero2"].device


def test_host_memory_bounds_offload_and_nothing_fits_is_said() -> None:
    memory = Memory(10 * GIB, 10 * GIB)
    choice = choose(SEVEN_B, memory, 1, dtype="bfloat16", accumulates=False, offload=True)
    assert (choice.preset, choice.fits) == ("zero3-offload", False)
    assert "NOTHING FITS" in auto._report(choice, SEVEN_B, memory, 1, "bfloat16", auto.ALONE)


def test_no_offload_where_host_and_device_are_the_same_memory() -> None:
    assert chosen(10, 1, offload=False) == "zero3"


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("--model_name_or_path gpt2 --bf16", "gpt2"),
        ("--model-name-or-path=gpt2", "gpt2"),
        ("--model a/b --config_name c", "c"),
        ("--bf16 --model --other", None),
        ("--output_dir out", None),
    ],
)
def test_the_model_on_the_command_line(line: str, model: str | None) -> None:
    assert model_on_command_line(line.split()) == model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=128,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def free(device_mib: float) -> Memory:
    return Memory(int(device_mib * 2**20), 2**40)


def test_decided_when_the_command_line_names_the_model(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", f"--model_name_or_path={model_folder}"])
    monkeypatch.setattr(auto, "free_device_memory", lambda: free(0.1))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed="auto")
    assert arguments.deepspeed == "auto"
    assert arguments.hf_deepspeed_config.is_zero3()  # in time for zero.Init in from_pretrained
    assert arguments.deepspeed_plugin.zero_stage == 3
    assert arguments.deepspeed_plugin.zero3_init_flag is True
    size = LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder)).num_parameters()
    printed = capsys.readouterr().err
    assert "--deepspeed auto takes zero3" in printed
    assert f"model: {size / 1e6:,.1f} M parameters" in printed


def test_decided_when_the_trainer_has_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(auto, "free_device_memory", lambda: free(1000))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed="auto")
    assert arguments.hf_deepspeed_config.get_value("zero_optimization.stage") == 1  # provisional
    assert "auto takes" not in capsys.readouterr().err
    model = torch.nn.Linear(4, 4)
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, 10)
    assert arguments.hf_deepspeed_config.get_value("zero_optimization.stage") == 0
    assert arguments.deepspeed_plugin.zero_stage == 0
    assert "--deepspeed auto takes zero0" in capsys.readouterr().err
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, 10)
    assert "auto takes" not in capsys.readouterr().err  # said once


@pytest.mark.parametrize(("sizes", "fits"), [({}, False), ({"tp_size": 2}, True)])
def test_a_process_has_its_part_of_shared_layers(
    sizes: dict[str, int],
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """16 bytes x 1 M are more than 70 % of 16 MiB, half of them are less."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(auto, "free_device_memory", lambda: free(16))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed="auto")
    arguments.parallelism_config = ParallelismConfig(**sizes)
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, torch.nn.Linear(1000, 1000, bias=False), 10)
    assert arguments.deepspeed_plugin.ds_hf_choice.fits is fits
    printed = capsys.readouterr().err
    assert ("2 to a layer" in printed) is fits
    assert ("--deepspeed auto takes zero0: the smallest that fits" in printed) is fits


def test_all_of_transformers_knows_what_was_decided_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_deepspeed_zero3_enabled()`` looks at the copy that the Accelerator has made before there was a choice."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(auto, "free_device_memory", lambda: free(1e-6))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed="auto")
    plugin = arguments.deepspeed_plugin
    plugin.set_deepspeed_weakref()  # as an Accelerator does that takes the plugin
    assert not is_deepspeed_zero3_enabled()
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, torch.nn.Linear(4, 4), 10)
    assert plugin.zero_stage == 3
    assert is_deepspeed_zero3_enabled()


def test_evaluation_alone_takes_the_stage_that_transformers_evaluates_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed="auto")
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, torch.nn.Linear(4, 4), 0)
    assert arguments.hf_deepspeed_config.is_zero3()
    assert "--deepspeed auto: zero3, the only one that transformers evaluates with" in capsys.readouterr().err


def test_free_memory_is_shared_by_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "available_memory", lambda: 8 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert auto.free_device_memory().host == 2 * GIB


def test_adapters_that_the_command_line_asks_for_train_alone(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [["--use_peft"], ["--use-peft", "--lora_r=4"], ["--use_peft", "True"], ["--use_peft=true"]]
    assert all(auto.adapts(argv) for argv in asked)
    assert not any(auto.adapts(argv) for argv in ([], ["--use_peft=false"], ["--use_peft", "False"], ["--peft"]))
    monkeypatch.setattr(sys, "argv", ["train.py", f"--model_name_or_path={model_folder}", "--use_peft"])
    monkeypatch.setattr(auto, "free_device_memory", lambda: free(1000))
    TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed="auto")
    size = LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder)).num_parameters()
    assert f"({size // auto.ADAPTERS / 1e6:,.1f} M trainable)" in capsys.readouterr().err
