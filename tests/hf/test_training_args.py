"""What happens when arguments are parsed: checks first, presets, text, CPU flags."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DeepSpeedPlugin
from transformers import HfArgumentParser, TrainingArguments

from ds_hf.errors import ConfigError
from ds_hf.hf import training_args

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}
CPU_ONLY = pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")


def make(tmp_path: Path, deepspeed: Any, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), report_to="none", deepspeed=deepspeed, **more)


def test_every_form_of_a_config(tmp_path: Path) -> None:
    text = json.dumps(AUTO)
    commented = tmp_path / "commented.json"
    commented.write_text(text.replace("{", "{ // by hand\n", 1).replace("}}", "},}"))
    plain = tmp_path / "plain.json"
    plain.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for given in (AUTO, str(commented), str(plain), encoded, text, "zero2"):
        arguments = make(tmp_path, given)
        assert arguments.hf_deepspeed_config.get_value("zero_optimization.stage") == 2
        assert arguments.hf_deepspeed_config.get_value("train_micro_batch_size_per_gpu") == 8
        assert arguments.deepspeed == given  # as the user gave it


def test_a_file_without_the_section_of_zero_is_stage_0(tmp_path: Path) -> None:
    """As in a loop; accelerate would stop with "Please specify the ZeRO optimization config"."""
    config = {"train_micro_batch_size_per_gpu": "auto"}
    assert make(tmp_path, config).deepspeed_plugin.zero_stage == 0
    assert config == {"train_micro_batch_size_per_gpu": "auto"}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert DeepSpeedPlugin(hf_ds_config=str(file)).zero_stage == 0


def test_preset_from_the_command_line(tmp_path: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    (arguments,) = parser.parse_args_into_dataclasses([f"--output_dir={tmp_path}", "--deepspeed=zero3"])
    assert arguments.hf_deepspeed_config.is_zero3()
    assert arguments.deepspeed_plugin.zero_stage == 3


def test_users_dict_stays_as_it_is(tmp_path: Path) -> None:
    config = {**AUTO, "bf16": {"enabled": "auto"}}
    before = json.dumps(config)
    make(tmp_path, config)
    assert json.dumps(config) == before


def test_auto_by_the_names_that_deepspeed_has_for_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and accelerate look for the aliases alone, and get these."""
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    own = ("prefetch_bucket_size", "param_persistence_threshold", "gather_16bit_weights_on_model_save")
    arguments = make(tmp_path, {**AUTO, "zero_optimization": {"stage": 3, **dict.fromkeys(own, "auto")}})
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=10))
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, 1)
    plugin: Any = arguments.deepspeed_plugin
    zero = plugin.hf_ds_config.config["zero_optimization"]
    assert [zero.pop(f"stage3_{name}") for name in own] == [90, 100, True]
    assert set(zero) == {"stage"}


def test_tensor_parallelism_that_is_off(tmp_path: Path) -> None:
    """0 is DeepSpeed's default, and Trainer.get_tp_size() would divide by it."""
    config = {**AUTO, "tensor_parallel": {"autotp_size": 0}}
    assert make(tmp_path, config).hf_deepspeed_config.config["tensor_parallel"] == {}
    config = {**AUTO, "tensor_parallel": {"autotp_size": 1}}
    assert make(tmp_path, config).hf_deepspeed_config.config["tensor_parallel"] == {"autotp_size": 1}


def test_faults_come_before_any_device_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TrainingArguments) -> torch.device:
        raise AssertionError("the device was set up first")

    monkeypatch.setattr(TrainingArguments, "device", property(fail))
    config = {**AUTO, "zero_optimization": {"stage": 7, "overlap_com": True}, "fp16": {"enabled": "maybe"}}
    with pytest.raises(ConfigError) as failure:
        make(tmp_path, config)
    assert {fault.pointer for fault in failure.value.faults} == {
        "/zero_optimization/stage",
        "/zero_optimization/overlap_com",
        "/fp16/enabled",
    }
    assert isinstance(failure.value, ValueError)


def test_all_mismatches_at_once_with_both_sources(tmp_path: Path) -> None:
    config = {
        **AUTO,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.99], "eps": 1e-8}},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.3,
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config, indent=1))
    with pytest.raises(ConfigError) as failure:
        make(tmp_path, str(file), learning_rate=1e-4, adam_epsilon=1e-8)
    faults = {fault.pointer: fault for fault in failure.value.faults}
    assert set(faults) == {
        "/train_micro_batch_size_per_gpu",
        "/optimizer/params/lr",
        "/optimizer/params/betas",
        "/bf16/enabled",
        "/gradient_clipping",
    }
    rate = faults["/optimizer/params/lr"]
    assert f"0.1 in {file}, but 0.0001 from --learning_rate" in rate.message
    assert 'write "auto"' in rate.fix
    lines = file.read_text().splitlines()
    assert rate.line is not None
    assert '"lr": 0.1' in lines[rate.line - 1]
    assert faults["/bf16/enabled"].message.endswith("from --bf16 (its default)")


def test_a_dict_is_compared_when_training_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**AUTO, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": 1000}
    caplog.set_level("WARNING")
    arguments = make(tmp_path, {**config, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, learning_rate=1e-4)
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "lr")
    assert all(key in caplog.text for key in keys)
    assert "Training will refuse to start" in caplog.text
    with pytest.raises(ValueError, match="mismatch TrainingArguments") as failure:
        arguments.hf_deepspeed_config.trainer_config_finalize(arguments, None, 10)
    assert all(key in str(failure.value) for key in keys)


def test_equal_values_and_auto_are_no_mismatch(tmp_path: Path) -> None:
    config = {
        **AUTO,
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": [0.9, 0.999], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 5}},
    }
    arguments = make(tmp_path, config, learning_rate=1.0, gradient_accumulation_steps=2, warmup_steps=5)
    assert arguments.hf_deepspeed_config.mismatches == []


def test_schedule_length_is_compared_where_it_is_known(tmp_path: Path) -> None:
    params = {"warmup_max_lr": "auto", "warmup_num_steps": 7, "total_num_steps": 50}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**AUTO, "scheduler": {"type": "WarmupDecayLR", "params": params}}))
    with pytest.raises(ConfigError) as failure:
        make(tmp_path, str(file), warmup_steps=5, max_steps=100)
    assert [fault.pointer for fault in failure.value.faults] == [
        "/scheduler/params/warmup_num_steps",
        "/scheduler/params/total_num_steps",
    ]


def test_batch_sizes_are_left_alone_when_they_are_searched_for(tmp_path: Path) -> None:
    config = {**AUTO, "train_micro_batch_size_per_gpu": 64}
    arguments = make(tmp_path, config, auto_find_batch_size=True)
    assert arguments.per_device_train_batch_size == 8


@CPU_ONLY
def test_bf16_without_an_accelerator(tmp_path: Path) -> None:
    arguments = make(tmp_path, "zero2", bf16=True)
    assert arguments.hf_deepspeed_config.get_value("bf16.enabled") is True
    assert arguments.hf_deepspeed_config.dtype() is torch.bfloat16
    assert arguments.use_cpu is False
    with pytest.raises(ValueError, match="bf16"):
        TrainingArguments(output_dir=str(tmp_path), bf16=True)  # without DeepSpeed transformers still refuses


@CPU_ONLY
def test_use_cpu_is_dropped_where_it_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(tmp_path, "zero2", use_cpu=True)
    assert arguments.use_cpu is False
    assert arguments.dataloader_pin_memory is False
    assert arguments.device == torch.device("cpu")
    monkeypatch.setenv(training_args.CPU_FLAG, "true")
    make(tmp_path, "zero2")
    assert os.environ[training_args.CPU_FLAG] == "false"


def test_use_cpu_is_refused_where_it_would_switch_deepspeed_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_args, "has_accelerator", lambda: True)
    with pytest.raises(ConfigError, match="--use_cpu makes accelerate switch DeepSpeed off"):
        make(tmp_path, "zero2", use_cpu=True)


def test_without_deepspeed_nothing_changes(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    assert arguments.use_cpu is True
    assert arguments.deepspeed_plugin is None


def test_subclasses_are_checked_too(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainingArguments

    with pytest.raises(ConfigError):
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), deepspeed={"zero_optimization": {"stge": 1}})


def test_elasticity_fills_in_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2, 4], "version": 0.1}
    zero = {"zero_optimization": {"stage": 1}}
    for more in ({}, {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}):
        arguments = make(tmp_path, {"elasticity": section, **zero, **more}, per_device_train_batch_size=3)
        assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 2)
        config = arguments.hf_deepspeed_config.config
        assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (8, 2)
    with pytest.raises(ConfigError, match="auto_find_batch_size would try others"):
        make(tmp_path, {"elasticity": section}, auto_find_batch_size=True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"3 data-parallel processes .*from the environment variable WORLD_SIZE"):
        make(tmp_path, {"elasticity": section})
