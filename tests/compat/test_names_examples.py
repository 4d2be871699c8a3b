"""Names that examples, Lightning and Megatron take from ``deepspeed``; figures are DeepSpeed 0.19.8's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator, is_current_accelerator_supported, real_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info
from deepspeed.launcher import runner
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from deepspeed.runtime.config import get_bfloat16_config as from_config
from deepspeed.runtime.precision_config import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    get_bfloat16_config,
    get_float16_config,
)
from deepspeed.runtime.sparse_tensor import SparseTensor
from deepspeed.runtime.utils import partition_balanced
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.numa import get_numa_cores, parse_range, parse_range_list
from deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
)
from pydantic import ValidationError
from torch import nn

from ds_hf.deepspeed_api.accelerator import CpuAccelerator
from tests.helpers.distributed import run_distributed


def test_the_accelerator_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_current_accelerator_supported() is True
    assert real_accelerator.is_current_accelerator_supported is is_current_accelerator_supported
    processor = CpuAccelerator()
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert processor.device_count() == 1
    for text, count in (("3", 3), ("0", 1), ("-2", 1), ("", 1)):
        monkeypatch.setenv("LOCAL_SIZE", text)
        assert processor.device_count() == count
    monkeypatch.setenv("LOCAL_SIZE", "many")
    with pytest.raises(ValueError, match="LOCAL_SIZE is 'many'"):
        processor.device_count()
    tensor = torch.ones(2, 3)
    assert processor.pin_memory(tensor) is tensor
    assert processor.pin_memory(tensor, make_copy=False, match_shape=False) is tensor
    assert processor.unpin_memory(tensor) is None
    assert get_accelerator().is_pinned(torch.ones(1)) is False


def test_what_was_built() -> None:
    assert set(torch_info) == {"version", "bf16_support", "cuda_version", "nccl_version", "hip_version"}
    assert torch.__version__.startswith(torch_info["version"] + ".")
    assert all(text.count(".") == 1 for key, text in torch_info.items() if key != "bf16_support")
    assert accelerator_name == get_accelerator().device_name()
    assert not any(installed_ops.values())


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0,2-4,6,8-9", [0, 2, 3, 4, 6, 8, 9])],
)
def test_ranges_of_cores(text: str, numbers: list[int]) -> None:
    assert parse_range_list(text) == numbers
    assert parse_range("2-4") == range(2, 5)
    assert all(isinstance(core, int) for node in get_numa_cores() for core in node)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "2-4,3", "1-2-3", "1,"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        parse_range_list(text)
    with pytest.raises(ValueError, match="range"):
        parse_range(text or "1,2")


def test_precision_sections() -> None:
    fp16 = DeepSpeedFP16Config(enabled=True, initial_scale_power=4, hysteresis=3)
    assert (fp16.enabled, fp16.loss_scale, fp16.loss_scale_window) == (True, 0, 1000)
    assert fp16.initial_dynamic_scale() == 16
    assert fp16.dynamic_loss_scale_args() == {
        "init_scale": 16,
        "scale_window": 1000,
        "delayed_shift": 3,
        "consecutive_hysteresis": False,
        "min_scale": 1,
    }
    for wrong in (
        {"loss_scale": -1},
        {"loss_scale": True},
        {"loss_scale": float("nan")},
        {"enabled": True, "loss_scale_window": 0},
        {"enabled": True, "min_loss_scale": -1},
        {"unknown": 1},
    ):
        with pytest.raises(ValueError, match="fp16"):
            DeepSpeedFP16Config(**wrong)
    with pytest.raises(ValidationError, match="loss_scale: -1 is too small"):  # a script may expect pydantic's models
        DeepSpeedFP16Config(loss_scale=-1)
    with pytest.raises(ValidationError, match="offload_optimizer"):
        DeepSpeedZeroConfig(offload_optimizer="{cpu}")
    assert DeepSpeedFP16Config(enabled=True, loss_scale=8, loss_scale_window=-1).loss_scale_window == -1
    assert DeepSpeedFP16Config(strict=False, enabled="auto") == DeepSpeedFP16Config()
    with pytest.raises(ValueError, match="auto"):
        DeepSpeedFP16Config(True, enabled="auto")
    assert get_float16_config({}).enabled is False
    assert get_bfloat16_config({"bf16": {"enabled": True}}).enabled is True
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).check_grad_overflow is True
    assert from_config({}) == DeepSpeedBF16Config()


def test_upper_case_settings_of_checkpointing() -> None:
    names = ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING", "SYNCHRONIZE", "PROFILE_TIME")
    point = deepspeed.checkpointing
    point.configure(None)
    assert [getattr(point, name) for name in names] == [False] * 5
    point.configure(None, partition_activations=True, checkpoint_in_cpu=True, profile=True)
    assert [getattr(point, name) for name in names] == [True, True, False, False, True]
    point.set_num_layers(7)
    assert (point.num_layers, point.mpu, point.deepspeed_checkpointing_enabled) == (7, None, True)
    point.configure(None, partition_activations=False, checkpoint_in_cpu=False, profile=False)
    assert [getattr(point, name) for name in names] == [False] * 5


def test_parameter_groups_of_a_model_without_experts() -> None:
    model = nn.Linear(3, 2)
    assert has_moe_layers(model) == (False, 0)
    assert not any(is_moe_param(p) for p in model.parameters())
    groups = split_params_into_different_moe_groups_for_optimizer({"params": model.parameters(), "name": "all"})
    assert groups == [{"params": list(model.parameters()), "name": "all"}]
    assert not is_moe_param_group(groups[0])
    two = ({"params": [model.weight], "name": "a", "lr": 1.0}, {"params": [model.bias], "name": "b"})
    assert [group["name"] for group in split_params_into_different_moe_groups_for_optimizer(two)] == ["a", "b"]
    assert configure_moe_param_groups(list(model.parameters()))[0]["name"] == "dense-params"
    assert configure_moe_param_groups(list(two)) == list(two)
    assert split_params_into_shared_and_expert_params(model.parameters()) == (list(model.parameters()), [])
    model.weight.grad = torch.ones(2, 3)
    shared, experts = split_params_grads_into_shared_and_expert_params(list(model.parameters()))
    assert (len(shared), experts) == (1, [])
    with pytest.raises(ValueError, match="not a int"):
        split_params_into_different_moe_groups_for_optimizer(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str"):
        configure_moe_param_groups(["weight"])


def test_parameter_groups_of_experts() -> None:
    model = nn.Sequential(nn.Linear(3, 3), MoE(3, nn.Linear(3, 3), num_experts=2), MoE(3, nn.Linear(3, 3), 4, 2))
    assert has_moe_layers(model) == (True, 2)
    shared, experts = split_params_into_shared_and_expert_params(model.parameters())
    assert (len(shared), len(experts)) == (4, 8)
    groups = configure_moe_param_groups(list(model.parameters()))
    assert [(group["name"], is_moe_param_group(group)) for group in groups] == [
        ("dense-params", False), ("ep_size_1", True), ("ep_size_2", True),
    ]  # fmt: skip
    assert configure_moe_param_groups(groups) is groups
    split = split_params_into_different_moe_groups_for_optimizer({"params": experts, "name": "a", "lr": 1.0}, 12)
    assert [[p.numel() for p in group["params"]] for group in split] == [[], *[[9, 3]] * 4]
    split = split_params_into_different_moe_groups_for_optimizer({"params": experts, "name": "a", "lr": 1.0}, 8)
    assert [[p.numel() for p in group["params"]] for group in split] == [[], *[[], [9], [3], [9], [3]] * 2]
    assert all(group["lr"] == 1.0 for group in split)
    with pytest.raises(ValueError, match='has no "name"'):
        split_params_into_different_moe_groups_for_optimizer({"params": experts})


def test_sparse_tensor() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([[1, 2, 3, 1]])).sum().backward()
    assert embedding.weight.grad is not None
    rows = SparseTensor(embedding.weight.grad)
    assert rows.indices is not None
    assert rows.indices.tolist() == [1, 2, 3]
    assert rows.dense_size == [10, 3]
    assert rows.sparse_size() == (3 + 9, 30)
    assert SparseTensor.type() == "deepspeed.SparseTensor"
    assert "reduction_factor=2.5" in str(rows)
    torch.testing.assert_close(rows.to_coo_tensor().to_dense(), embedding.weight.grad.to_dense())
    rows.add(SparseTensor(embedding.weight.grad))
    torch.testing.assert_close(rows.to_coo_tensor().to_dense(), 2 * embedding.weight.grad.to_dense())
    with pytest.raises(AssertionError, match=r"\[4, 3\]"):
        rows.add(SparseTensor(torch.ones(4, 3).to_sparse(1)))
    matrix = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.0, 2.0]])  # a row may add up to zero
    dense = SparseTensor(matrix)
    assert dense.indices is not None
    assert (dense.indices.tolist(), dense.is_sparse) == ([1, 2], False)
    torch.testing.assert_close(dense.to_dense(), matrix)
    dense.add(dense)
    torch.testing.assert_close(dense.to_dense(), 2 * matrix)
    empty = SparseTensor()
    assert (empty.indices, empty.values, empty.dense_size) == (None, None, None)
    empty.indices, empty.values, empty.dense_size = torch.tensor([0]), torch.ones(1, 2), [2, 2]
    assert empty.to_coo_tensor().to_dense().tolist() == [[1, 1], [0, 0]]


# weights, parts, DeepSpeed 0.19.8's bounds
PARTITIONS: list[tuple[list[float], int, list[int]]] = [
    ([1000, 1, 1000, 100, 1000, 1, 1000, 1, 1, 1000, 1], 2, [0, 4, 11]),
    ([0, 1, 0, 0, 0, 1, 0], 6, [0, 2, 3, 4, 5, 6, 7]),
    ([2, 0, 1, 2, 0, 1, 2, 2, 2, 0], 3, [0, 5, 7, 10]),
    ([4, 5, 5, 2, 2, 8, 8, 2, 6, 2, 7, 3], 3, [0, 5, 8, 12]),
    ([9, 5, 7, 4, 5, 7, 5, 9, 5, 9, 6, 1, 7, 6], 5, [0, 3, 6, 9, 11, 14]),
    ([0.466, 0.679, 0.353, 0.707, 0.738, 0.022, 0.061, 0.676, 0.963, 0.251, 0.456], 6, [0, 2, 4, 5, 8, 9, 11]),
    ([0.177, 0.185, 0.758, 0.844, 0.264, 0.787, 0.105, 0.813, 0.971, 0.684], 5, [0, 3, 4, 6, 8, 10]),
    ([0.807, 0.838, 0.184, 0.279, 0.807, 0.642, 0.806, 0.345, 0.13], 2, [0, 4, 9]),
    ([1, 100, 1000, 1000, 100, 1000, 1000], 2, [0, 4, 7]),
    ([1, 1000, 100, 1, 1, 1, 1, 1000, 1000], 3, [0, 3, 8, 9]),
    ([100, 1000, 100, 1000], 5, [0, 1, 2, 3, 4, 4]),
    ([2, 1, 1, 2, 1], 6, [0, 1, 2, 3, 4, 5, 5]),
]


@pytest.mark.parametrize(("weights", "parts", "bounds"), PARTITIONS)
def test_partitions_are_those_of_deepspeed(weights: list[float], parts: int, bounds: list[int]) -> None:
    assert partition_balanced(weights, parts) == bounds


@pytest.mark.parametrize(
    "flags",
    [
        ["--num_gpus", "1", "--include", "localhost:0"],
        ["--num_nodes", "1", "--exclude", "localhost:0"],
        ["--module", "--no_python"],
    ],
)
def test_flags_that_exclude_each_other_are_a_value_error(flags: list[str]) -> None:
    with pytest.raises(ValueError, match="both given"):
        runner.main([*flags, "train.py"])


def saves(folder: str, stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    state = {"pytorch-lightning_version": "2.6", "hyper_parameters": {"width": 4}, "epoch": 3}
    engine.save_checkpoint(folder, tag="checkpoint", client_state=state)
    _, given = engine.load_checkpoint(folder, tag="checkpoint")
    assert given == state


@pytest.mark.parametrize("stage", [2, 3])
def test_files_are_found_and_tell_what_lightnings_converter_reads(stage: int, tmp_path: Path) -> None:
    run_distributed(saves, 2, str(tmp_path), stage)
    folder = tmp_path / "checkpoint"
    optimizers = get_optim_files(folder)
    assert [Path(name).name for name in optimizers] == [
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    told = torch.load(optimizers[0], weights_only=False)["optimizer_state_dict"]
    assert told == {"zero_stage": stage, "partition_count": 2}
    content: dict[str, Any] = torch.load(get_model_state_file(folder, stage), weights_only=False)
    assert (content["epoch"], content["hyper_parameters"]) == (3, {"width": 4})
    assert content["global_steps"] == 1
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(weights) >= {"0.weight", "0.bias", "1.weight", "1.running_mean"}
    with pytest.raises(FileNotFoundError, match="there is no file"):
        get_model_state_file(folder, 5 - stage)
    with pytest.raises(FileNotFoundError, match="optim_states"):
        get_optim_files(tmp_path)
